"""`ood_study`: the scores of a posterior's predictions beside those of its logits and features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from credo.core.network.inputs import Forward, Target
from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.detection.comparison import OodComparison, compare_scores
from credo.detection.detector import OodDetector
from credo.evaluate import auroc, ood_score
from credo.predict import ClassPrediction, predict_classes

OWN_SCORES = ("entropy", "mutual-information", "msp")


@dataclass(frozen=True, eq=False)
class OodStudy:
    """Scores of in-distribution inputs and of sets of OOD inputs, and how well they tell them apart.

    Attributes:
        inside: Scores [n] of in-distribution inputs by name.
        outside: By set, scores of its inputs by name.
        comparisons: By set, AUROC and FPR95 of all scores, compared with the best of the prediction's own.
    """

    inside: dict[str, Tensor]
    outside: dict[str, dict[str, Tensor]]
    comparisons: dict[str, OodComparison]

    def to_dict(self) -> dict[str, Any]:
        """The comparisons as plain numbers."""
        return {name: found.to_dict() for name, found in self.comparisons.items()}


@checked_keywords()
def ood_study(
    posterior: Posterior,
    train: Iterable[Any],
    inside: Tensor | Iterable[Any],
    outside: Mapping[str, Tensor | Iterable[Any]],
    *,
    scores: str | Sequence[str] = "all",
    draws: int = 8,
    predictions: tuple[ClassPrediction, Mapping[str, ClassPrediction]] | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = True,
    forward: Forward | None = None,
    target: Target | None = None,
) -> OodStudy:
    """Compare how well scores of logits and features, and of averaged probabilities, detect OOD inputs.

    The network runs `draws` times on every input, and on at most 10,000 training examples.

    Args:
        posterior: A posterior with a class likelihood.
        train: The training batches, (inputs, labels).
        inside: Held-out in-distribution inputs, a tensor or batches that can be read twice.
        outside: Sets of OOD inputs by name, of the same kind.
        scores: Names in `DETECTOR_SCORES`, `"all"`, or none, `()`.
        draws: Networks to average over, for all scores; 0: the mean network, for those of logits and features.
        predictions: Predictions on `inside` and on each set, where they exist already.
        level: Confidence level of the intervals.
        resamples: Bootstrap resamples of the intervals.
        seed: Seed of draws and resamples.
        progress: Show a progress bar while the scores are fitted; only on an interactive terminal.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in `predict`.
        target: `target(batch)` returns the labels of training batches; None: by the form of the batch.
    """
    if predictions is None:
        options: dict[str, Any] = {"draws": max(1, draws), "seed": seed, "forward": forward}
        plain = posterior.frozen_copy()
        plain.conformal = None  # sets are of no use here, and may have been chosen for more draws
        groups = {name: predict_classes(plain, x, **options) for name, x in outside.items()}
        predictions = predict_classes(plain, inside, **options), groups
    within = own_scores(predictions[0])
    beyond = {name: own_scores(predictions[1][name]) for name in outside}
    if scores:
        reading: dict[str, Any] = {"forward": forward, "target": target}
        detector = OodDetector(posterior, scores, draws=draws, seed=seed, **reading).fit(train, progress=progress)
        within |= detector.scores(inside)
        for name, inputs in outside.items():
            beyond[name] |= detector.scores(inputs)
    comparisons = {
        name: compare_scores(within, found, reference=_best(within, found), level=level, resamples=resamples, seed=seed)
        for name, found in beyond.items()
    }
    return OodStudy(within, beyond, comparisons)


def own_scores(prediction: ClassPrediction) -> dict[str, Tensor]:
    """The scores of averaged probabilities, by name.

    Args:
        prediction: The prediction.
    """
    return {name: ood_score(name, prediction.probs, epistemic=prediction.epistemic) for name in OWN_SCORES}


def _best(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]) -> str:
    """The prediction's own score with the highest AUROC."""
    return max(OWN_SCORES, key=lambda name: auroc(outside[name], inside[name]))
