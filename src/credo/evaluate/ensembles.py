"""Accuracy as a function of the number of averaged networks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count
from credo.evaluate.samples import Piece, sample_study, study_batches

SIZES = (1, 5, 10, 25, 100)


@dataclass(frozen=True)
class EnsembleStudy:
    """Accuracies of ensembles by their size: `accuracies[5]` is [draws // 5], one for each ensemble of five."""

    accuracies: dict[int, Tensor]

    @property
    def means(self) -> dict[int, float]:
        """Average accuracy by number of networks; that of 1 is the average accuracy of one network."""
        return {size: float(each.mean()) for size, each in self.accuracies.items()}


@checked_keywords()
def ensemble_study(
    posterior: Posterior, batches: Iterable[Any], sizes: Sequence[int] = SIZES, *, draws: int = 100, seed: int = 0
) -> EnsembleStudy:
    """Accuracy of ensembles of N networks, for each N in `sizes`.

    `draws` fixed networks are split into draws // N ensembles without overlap, as Zhang and Chen (2020) average over
    100/N runs; networks left over are not used. Ensembles average probabilities. All sizes use the same networks, those
    of `sample_study` with the same seed. Of a point estimate all networks are equal.

    Args:
        posterior: Posterior with a class likelihood.
        batches: Batches of (inputs, labels).
        sizes: Numbers of networks per ensemble.
        draws: Number of networks.
        seed: Seed of the draws.
    """
    draws = checked_count("draws", draws)
    sizes = [checked_count("size", size, what="networks") for size in sizes]
    if not sizes or max(sizes) > draws:
        raise ValueError(f"sizes={list(sizes)} with draws={draws}: give one or more, none above the number of draws.")
    if not posterior.is_random:
        return _of_fixed_networks(posterior, batches, sizes, draws)
    hits: dict[int, list[Tensor]] = {size: [] for size in sizes}

    def see(pieces: Iterator[Piece]) -> None:
        for size, found in _ensemble_hits(pieces, sizes).items():
            hits[size].append(found)

    study_batches(posterior, batches, draws, seed, see)
    return EnsembleStudy({size: torch.cat(found, dim=1).double().mean(1) for size, found in hits.items()})


def _ensemble_hits(pieces: Iterator[Piece], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Which ensemble is right about which input, [draws // size, batch] for each size."""
    sums: dict[int, Tensor] = {}
    hits: dict[int, list[Tensor]] = {size: [] for size in sizes}
    seen = 0
    for probs, labels in pieces:
        for one in probs:
            seen += 1
            for size in sizes:
                sums[size] = sums[size] + one if size in sums else one
                if seen % size == 0:
                    hits[size].append((sums.pop(size).argmax(-1) == labels).cpu())
    return {size: torch.stack(found) for size, found in hits.items()}


def _of_fixed_networks(posterior: Posterior, batches: Iterable[Any], sizes: Sequence[int], draws: int) -> EnsembleStudy:
    networks = posterior.whole_draws(draws)
    if networks > 1:
        raise ValueError(
            f"This {type(posterior).__name__} is {networks} fixed networks, with nothing to draw: sample_study gives "
            "the accuracy of each and of all together."
        )
    accuracy = sample_study(posterior, batches, draws=1).accuracies
    return EnsembleStudy({size: accuracy.expand(draws // size).clone() for size in sizes})
