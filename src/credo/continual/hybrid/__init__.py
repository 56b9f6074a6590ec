"""Streams without task labels: one normalising flow, a Gaussian per class and task (Kirichenko et al. 2021)."""

from credo.continual.hybrid.detection import Decision, TaskDetector
from credo.continual.hybrid.features import feature_tasks, features_of
from credo.continual.hybrid.flow import Flow
from credo.continual.hybrid.learner import FORGETTING, StreamLearner, StreamStep
from credo.continual.hybrid.model import HybridFlow
from credo.continual.hybrid.run import StreamResult, detection_summary, run_stream
from credo.continual.hybrid.streams import Segment, Stream

__all__ = [
    "FORGETTING",
    "Decision",
    "Flow",
    "HybridFlow",
    "Segment",
    "Stream",
    "StreamLearner",
    "StreamResult",
    "StreamStep",
    "TaskDetector",
    "detection_summary",
    "feature_tasks",
    "features_of",
    "run_stream",
]
