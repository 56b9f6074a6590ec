"""Continual learning: the posterior after one task is the prior of the next."""

from typing import Any

from credo.continual.gaussian_algebra import GaussianMoments, compare, merge, moments_of
from credo.continual.hybrid import (
    HybridFlow,
    Stream,
    StreamLearner,
    StreamResult,
    TaskDetector,
    detection_summary,
    feature_tasks,
    run_stream,
)
from credo.continual.joint import learn_jointly
from credo.continual.learner import CARRIES, Learner
from credo.continual.metrics import backward_transfer, forward_transfer, mean_accuracy
from credo.continual.sequence import SequenceResult, run_sequence
from credo.continual.tasks import Task, permuted_tasks, split_tasks, tasks_of
from credo.core.support.user_warnings import warn

__all__ = [
    "CARRIES",
    "GaussianMoments",
    "HybridFlow",
    "Learner",
    "SequenceResult",
    "Stream",
    "StreamLearner",
    "StreamResult",
    "Task",
    "TaskDetector",
    "backward_transfer",
    "compare",
    "detection_summary",
    "feature_tasks",
    "forward_transfer",
    "learn_jointly",
    "mean_accuracy",
    "merge",
    "moments_of",
    "permuted_tasks",
    "run_sequence",
    "run_stream",
    "split_tasks",
    "tasks_of",
]

_RENAMED: dict[str, Any] = {"Belief": GaussianMoments, "belief_of": moments_of, "Sequel": SequenceResult}


def __getattr__(name: str) -> Any:
    """Names of 0.1, until 0.3."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'credo.continual' has no attribute {name!r}")
    new = _RENAMED[name]
    text = f"credo.continual.{name} is now {new.__name__}; the old name goes in 0.3."
    warn(text, DeprecationWarning)
    return new
