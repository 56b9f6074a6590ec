"""How single sampled networks differ from each other and from their ensemble."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.likelihood import ClassLikelihood
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count
from credo.evaluate.intervals import Interval, bootstrap, paired_difference
from credo.predict.draw_loop import Loop, draw_loop
from credo.predict.moments import class_labels, class_log_probs
from credo.predict.run import batches_of

Piece = tuple[Tensor, Tensor]  # probabilities [networks, batch, classes] and labels [batch]


@dataclass(frozen=True)
class SampleStudy:
    """Accuracies [draws] of networks that were each drawn once for the whole data set, and of their ensemble.

    `hits` [draws, inputs] marks which inputs each network classifies correctly, `ensemble_hits` [inputs] the ensemble.
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

    def by_input(self) -> dict[str, Tensor]:
        """Values [inputs] whose means are the numbers of the study.

        `lowest` and `highest` are those of the worst and the best network on all inputs, `spread` is their difference.
        """
        low, high = (self.hits[int(index)].double() for index in (self.accuracies.argmin(), self.accuracies.argmax()))
        means = {"lowest": low, "highest": high, "mean": self.hits.double().mean(0)}
        return {**means, "ensembled": self.ensemble_hits.double(), "spread": high - low}

    def intervals(self, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> dict[str, Interval]:
        """Bootstrap intervals over the inputs, for every value of `by_input`.

        The networks are fixed, also the lowest and the highest: the variation between draws is not covered, nor the
        selection of the extremes.

        Args:
            level: Confidence level.
            resamples: Number of bootstrap resamples.
            seed: Seed of the resampling.
        """
        how: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
        return {name: bootstrap(values, **how) for name, values in self.by_input().items()}

    def minus(
        self, other: SampleStudy, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> dict[str, Interval]:
        """Differences to another study, paired input by input.

        Args:
            other: Study on the same inputs in the same order.
            level: Confidence level.
            resamples: Number of bootstrap resamples.
            seed: Seed of the resampling.
        """
        how: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
        own, others = self.by_input(), other.by_input()
        return {name: paired_difference(values, others[name], **how) for name, values in own.items()}


@checked_keywords()
def sample_study(posterior: Posterior, batches: Iterable[Any], *, draws: int = 100, seed: int = 0) -> SampleStudy:
    """Lowest, highest, mean and ensembled accuracy of `draws` fixed networks.

    The ensemble averages the probabilities of all. MC-dropout has no fixed networks: its masks differ from input to
    input, so its lowest and highest lie closer together than those of a weight posterior.

    Args:
        posterior: Posterior with a class likelihood.
        batches: Batches of (inputs, labels).
        draws: Number of networks.
        seed: Seed of the draws.
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
    """Call `see` for each batch with the probabilities of the same `draws` networks, piece by piece.

    Args:
        posterior: Posterior with a class likelihood.
        batches: Batches of (inputs, labels).
        draws: Number of networks.
        seed: Seed of the draws.
        see: Called with an iterator of (probabilities [networks, batch, classes], labels).
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, ClassLikelihood):
        raise TypeError("Studies of single networks count right labels: they need a class likelihood.")
    loop = None
    with evaluating(posterior, seed) as frozen:
        temperature = 1.0 if frozen.calibration is None else frozen.calibration.temperature
        for x, y in batches_of(batches, 1024):
            if y is None:
                raise ValueError("Studies of single networks need batches of (inputs, labels).")
            x, y = x.to(frozen.device), y.to(frozen.device)
            if loop is None:
                loop = draw_loop(frozen, x, draws=draws, shared=True)
            with frozen.seeded(seed):
                loop.begin()
                see(_pieces(likelihood, loop, x, y, draws, temperature))
    if loop is None:
        raise ValueError("There was no input.")


def _pieces(
    likelihood: ClassLikelihood, loop: Loop, x: AnyInputs, y: Tensor, draws: int, temperature: float
) -> Iterator[Piece]:
    for start in range(0, draws, 10):
        probs = class_log_probs(likelihood, loop.outputs(x, min(10, draws - start)), temperature).exp()
        yield probs, class_labels(y, *probs.shape[1:])
