"""How single sampled networks differ from each other and from their ensemble."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.likelihood import ClassLikelihood
from credo.core.posterior import Posterior
from credo.predict.engine import batches_of, evaluating
from credo.predict.moments import class_labels, class_log_probs, summable
from credo.predict.strategies import choose_strategy


@dataclass(frozen=True)
class SampleStudy:
    """Accuracies [draws] of networks that were each drawn once for the whole data set, and of their ensemble."""

    accuracies: Tensor
    ensembled: float

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


@torch.no_grad()
def sample_study(posterior: Posterior, batches: Iterable[Any], *, draws: int = 100, seed: int = 0) -> SampleStudy:
    """Lowest, highest, mean and ensembled accuracy of `draws` fixed networks on (inputs, labels) batches.

    The ensemble averages probabilities over all of them. MC-dropout has no fixed networks: its masks differ from input
    to input, so its lowest and highest lie closer together than those of a weight posterior.
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, ClassLikelihood):
        raise TypeError("sample_study counts right labels: it needs a class likelihood.")
    if draws < 1:
        raise ValueError(f"draws={draws}: at least one is needed.")
    draws = draws if posterior.is_random else posterior.whole_draws(draws)
    right = torch.zeros(draws, dtype=torch.float64)
    ensemble_right, total = 0.0, 0
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
                for start in range(0, draws, 10):
                    count = min(10, draws - start)
                    each = class_log_probs(likelihood, summable(plan.outputs(x, count))).exp()
                    labels = class_labels(y, *each.shape[1:])
                    right[start : start + count] += (each.argmax(-1) == labels).double().sum(-1).cpu()
                    probs = each.sum(0) if probs is None else probs + each.sum(0)
            assert probs is not None
            ensemble_right += float((probs.argmax(-1) == labels).sum())
            total += len(labels)
    if total == 0:
        raise ValueError("There was no input.")
    return SampleStudy(right / total, ensemble_right / total)
