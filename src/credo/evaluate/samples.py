"""How single sampled networks differ from each other and from their ensemble."""

from __future__ import annotations

from collections.abc import Iterable
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
from credo.predict.strategies import choose_strategy


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


@torch.no_grad()
def sample_study(posterior: Posterior, batches: Iterable[Any], *, draws: int = 100, seed: int = 0) -> SampleStudy:
    """Lowest, highest, mean and ensembled accuracy of `draws` fixed networks on (inputs, labels) batches.

    The ensemble averages probabilities over all of them. MC-dropout has no fixed networks: its masks differ from input
    to input, so its lowest and highest lie closer together than those of a weight posterior.
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, ClassLikelihood):
        raise TypeError("sample_study counts right labels: it needs a class likelihood.")
    draws = checked_count("draws", draws)
    draws = draws if posterior.is_random else posterior.whole_draws(draws)
    hits: list[Tensor] = []
    ensemble_hits: list[Tensor] = []
    plan = None
    with evaluating(posterior), posterior.seeded(seed):
        for x, y in batches_of(batches, 1024):
            if y is None:
                raise ValueError("sample_study needs batches of (inputs, labels).")
            x, y = x.to(posterior.device), y.to(posterior.device)
            if plan is None:
                plan = choose_strategy(posterior, x, name="auto", draws=draws, shared=True, seed=seed)
            with posterior.seeded(seed):
                plan.restart()
                probs: Tensor | None = None
                right: list[Tensor] = []
                for start in range(0, draws, 10):
                    count = min(10, draws - start)
                    each = class_log_probs(likelihood, summable(plan.outputs(x, count))).exp()
                    labels = class_labels(y, *each.shape[1:])
                    right.append((each.argmax(-1) == labels).cpu())
                    probs = each.sum(0) if probs is None else probs + each.sum(0)
            assert probs is not None
            hits.append(torch.cat(right))
            ensemble_hits.append((probs.argmax(-1) == labels).cpu())
    if not hits:
        raise ValueError("There was no input.")
    each_hits, together = torch.cat(hits, dim=1), torch.cat(ensemble_hits)
    return SampleStudy(each_hits.double().mean(1), float(together.double().mean()), each_hits, together)
