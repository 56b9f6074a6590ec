"""How single sampled networks differ from each other and from their ensemble."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.counts import checked_count
from credo.core.likelihood import ClassLikelihood
from credo.core.posterior import Posterior
from credo.evaluate.intervals import Interval, interval, resampled_counts
from credo.predict.engine import batches_of, evaluating
from credo.predict.moments import class_labels, class_log_probs, summable
from credo.predict.strategies import Strategy, choose_strategy

Piece = tuple[Tensor, Tensor]  # probabilities [networks, batch, classes] and labels [batch]


@dataclass(frozen=True)
class SampleStudy:
    """Accuracies [draws] of networks that were each drawn once for the whole data set, and of their ensemble.

    `hits` [draws, inputs] says which network is right about which input, `ensemble_hits` [inputs] the ensemble.
    """

    accuracies: Tensor
    ensembled: float
    hits: Tensor
    ensemble_hits: Tensor

    @property
    def lowest(self) -> float:
        """Accuracy of the worst network."""
        return float(self.accuracies.min())

    @property
    def highest(self) -> float:
        """Accuracy of the best network."""
        return float(self.accuracies.max())

    @property
    def mean(self) -> float:
        """Average accuracy of one network."""
        return float(self.accuracies.mean())

    def intervals(self, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> dict[str, Interval]:
        """Bootstrap intervals over the inputs, for these same networks: what another test set might have given.

        Of `spread`, highest − lowest, too. How much other draws would differ is not in them.
        """
        each, together = self.hits.float(), self.ensemble_hits.float()
        values: dict[str, list[Tensor]] = {"lowest": [], "highest": [], "mean": [], "ensembled": [], "spread": []}
        for counts in resampled_counts(len(together), resamples, seed):
            shares = counts.T / len(together)
            accuracies = each @ shares
            low, high = accuracies.amin(0), accuracies.amax(0)
            found = {"lowest": low, "highest": high, "spread": high - low, "mean": accuracies.mean(0)}
            for name, new in {**found, "ensembled": together @ shares}.items():
                values[name].append(new)
        own = {"lowest": self.lowest, "highest": self.highest, "mean": self.mean, "ensembled": self.ensembled}
        own["spread"] = self.highest - self.lowest
        return {name: interval(own[name], torch.cat(found).double(), level) for name, found in values.items()}


def sample_study(posterior: Posterior, batches: Iterable[Any], *, draws: int = 100, seed: int = 0) -> SampleStudy:
    """Lowest, highest, mean and ensembled accuracy of `draws` fixed networks on (inputs, labels) batches.

    The ensemble averages probabilities over all of them. MC-dropout has no fixed networks: its masks differ from input
    to input, so its lowest and highest lie closer together than those of a weight posterior.
    """
    draws = checked_count("draws", draws)
    draws = draws if posterior.is_random else posterior.whole_draws(draws)
    hits: list[Tensor] = []
    ensemble_hits: list[Tensor] = []

    def see(pieces: Iterator[Piece]) -> None:
        total: Tensor | None = None
        right: list[Tensor] = []
        for probs, labels in pieces:
            right.append((probs.argmax(-1) == labels).cpu())
            total = probs.sum(0) if total is None else total + probs.sum(0)
        assert total is not None
        hits.append(torch.cat(right))
        ensemble_hits.append((total.argmax(-1) == labels).cpu())

    study_batches(posterior, batches, draws, seed, see)
    each_hits, together = torch.cat(hits, dim=1), torch.cat(ensemble_hits)
    return SampleStudy(each_hits.double().mean(1), float(together.double().mean()), each_hits, together)


@torch.no_grad()
def study_batches(
    posterior: Posterior, batches: Iterable[Any], draws: int, seed: int, see: Callable[[Iterator[Piece]], None]
) -> None:
    """Call `see` for each batch with what the same `draws` networks say of it, piece by piece."""
    likelihood = posterior.likelihood
    if not isinstance(likelihood, ClassLikelihood):
        raise TypeError("Studies of single networks count right labels: they need a class likelihood.")
    plan = None
    with evaluating(posterior), posterior.seeded(seed):
        for x, y in batches_of(batches, 1024):
            if y is None:
                raise ValueError("Studies of single networks need batches of (inputs, labels).")
            x, y = x.to(posterior.device), y.to(posterior.device)
            if plan is None:
                plan = choose_strategy(posterior, x, name="auto", draws=draws, shared=True, seed=seed)
            with posterior.seeded(seed):
                plan.restart()
                see(_pieces(likelihood, plan, x, y, draws))
    if plan is None:
        raise ValueError("There was no input.")


def _pieces(likelihood: ClassLikelihood, plan: Strategy, x: Tensor, y: Tensor, draws: int) -> Iterator[Piece]:
    for start in range(0, draws, 10):
        probs = class_log_probs(likelihood, summable(plan.outputs(x, min(10, draws - start)))).exp()
        yield probs, class_labels(y, *probs.shape[1:])
