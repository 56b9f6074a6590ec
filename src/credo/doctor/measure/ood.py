"""Whether scores of features detect given out-of-distribution inputs better than those of the predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.detection import DETECTOR_SCORES, OWN_SCORES, ood_study
from credo.doctor.subset import Subset, loader_restored
from credo.evaluate import Interval
from credo.predict.run import batches_of

_DRAWS = 8


@dataclass(frozen=True)
class Detection:
    """Detection of one set.

    Attributes:
        name: Of the set.
        own: The best of the prediction's own scores, chosen in hindsight, with
        own_auroc: its AUROC.
        score: The best score of logits or features, with
        auroc: its AUROC.
        gain: Difference of the two, with an interval that allows for the choice among all of those scores.
    """

    name: str
    own: str
    own_auroc: float
    score: str
    auroc: float
    gain: Interval

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def detections(
    posterior: Posterior,
    loader: Iterable[Any],
    inside: Subset,
    outside: Mapping[str, Tensor | Iterable[Any]],
    *,
    draws: int,
    most: int,
    seed: int,
) -> list[Detection]:
    """Measure the detection of every set.

    Args:
        posterior: The posterior.
        loader: Training data, to whose features scores are fitted.
        inside: Held-out examples.
        outside: Out-of-distribution inputs by name of their set.
        draws: Weight draws, of which at most 8 are used.
        most: Inputs of each set to use.
        seed: Seed of the draws.
    """
    if not outside:
        return []
    sets = {name: _first(inputs, most) for name, inputs in outside.items()}
    with loader_restored(loader):
        study = ood_study(
            posterior,
            loader,
            inside.split(),
            sets,
            draws=min(draws, _DRAWS),
            level=1 - 0.05 / len(DETECTOR_SCORES),  # Bonferroni: the best of them is chosen
            seed=seed,
            progress=False,
        )
    found = []
    for name, each in study.comparisons.items():
        best = max(DETECTOR_SCORES, key=lambda score: each.auroc[score].value)
        own = each.reference
        assert own in OWN_SCORES
        found.append(Detection(name, own, each.auroc[own].value, best, each.auroc[best].value, each.auroc_gain[best]))
    return found


def _first(inputs: Tensor | Iterable[Any], most: int) -> list[AnyInputs]:
    """At most `most` inputs, in batches."""
    found: list[AnyInputs] = []
    left = most
    for x, _ in batches_of(inputs, 512):
        found.append(x[:left])
        left -= len(found[-1])
        if left <= 0:
            break
    if not found:
        raise ValueError("A set of out-of-distribution inputs is empty: there is nothing to detect.")
    return found
