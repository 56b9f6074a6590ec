"""The scores by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError, unknown
from credo.core.likelihood import ClassLikelihood, Likelihood
from credo.detection.scores import FittedScore, Knn, Mahalanobis, Training, Vim, energy, max_logit

LOGIT_SCORES: dict[str, Callable[[Tensor], Tensor]] = {"energy": energy, "max-logit": max_logit}
FEATURE_SCORES: dict[str, type[Knn | Mahalanobis | Vim]] = {
    "knn": Knn,
    "mahalanobis": Mahalanobis,
    "relative-mahalanobis": Mahalanobis,
    "vim": Vim,
}
DETECTOR_SCORES = (*LOGIT_SCORES, *FEATURE_SCORES)
OF_FEATURES_ALONE = ("knn", "mahalanobis", "relative-mahalanobis")


def fit_scores(
    names: Sequence[str], trainings: Sequence[Training], *, k: int | None, directions: int | None
) -> list[dict[str, FittedScore]]:
    """Fit scores of features for every network, by name; networks with the same features share them.

    Args:
        names: In `FEATURE_SCORES`.
        trainings: What they are fitted to, for each network.
        k: Which neighbour counts for `"knn"`.
        directions: Principal directions of `"vim"`.
    """
    found: list[dict[str, FittedScore]] = []
    for training in trainings:
        # Draws of the last layer alone have the features of the first.
        is_same = bool(found) and torch.equal(training.features, trainings[0].features)
        shared = {name: found[0][name] for name in names if is_same and name in OF_FEATURES_ALONE}
        own = (name for name in names if name not in shared)
        found.append({**shared, **{name: fit_score(name, training, k=k, directions=directions) for name in own}})
    return found


def fit_score(name: str, training: Training, *, k: int | None, directions: int | None) -> FittedScore:
    """Fit a score of features.

    Args:
        name: In `FEATURE_SCORES`.
        training: What it is fitted to.
        k: Which neighbour counts for `"knn"`.
        directions: Principal directions of `"vim"`.
    """
    if not bool(training.features.isfinite().all()):
        raise NonFiniteError("Features of training examples are NaN or infinite: there is nothing to compare with.")
    if name == "knn":
        return Knn.fit(training, k=k)
    if name == "vim":
        return Vim.fit(training, directions=directions)
    return Mahalanobis.fit(training, relative=name == "relative-mahalanobis")


def checked_names(score: str | Sequence[str], likelihood: Likelihood) -> tuple[str, ...]:
    """The scores that are meant; raises ValueError if one is unknown, or impossible for a regression.

    Args:
        score: A name, several, or `"all"`.
        likelihood: What the network's outputs mean.
    """
    possible = DETECTOR_SCORES if isinstance(likelihood, ClassLikelihood) else ("knn",)
    names = possible if score == "all" else (score,) if isinstance(score, str) else tuple(dict.fromkeys(score))
    for name in names:
        if name not in DETECTOR_SCORES:
            raise ValueError(unknown("score", str(name), [*DETECTOR_SCORES, "all"]))
        if name not in possible:
            raise ValueError(f"The score {name!r} needs classes; of a regression, only 'knn' is possible.")
    if not names:
        raise ValueError(f"No score was given; possible are {', '.join(possible)}.")
    return names
