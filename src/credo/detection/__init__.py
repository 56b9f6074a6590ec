"""Out-of-distribution detection by scores of logits and features, and the comparison of scores."""

from credo.detection.comparison import OodComparison, compare_scores
from credo.detection.detector import OodDetector
from credo.detection.kinds import DETECTOR_SCORES, FEATURE_SCORES, LOGIT_SCORES
from credo.detection.scores import FittedScore, Knn, Mahalanobis, Training, Vim, energy, max_logit
from credo.detection.study import OWN_SCORES, OodStudy, ood_study, own_scores

__all__ = [
    "DETECTOR_SCORES",
    "FEATURE_SCORES",
    "LOGIT_SCORES",
    "OWN_SCORES",
    "FittedScore",
    "Knn",
    "Mahalanobis",
    "OodComparison",
    "OodDetector",
    "OodStudy",
    "Training",
    "Vim",
    "compare_scores",
    "energy",
    "max_logit",
    "ood_study",
    "own_scores",
]
