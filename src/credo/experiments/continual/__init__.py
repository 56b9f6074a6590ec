"""Continual learning as experiments: sequences of tasks with boundaries, and streams without."""

from credo.experiments.continual.sequence import (
    KINDS,
    Continual,
    ContinualExperiment,
    learned_jointly,
    make_continual,
    make_learner,
    make_tasks,
    run_continual,
)
from credo.experiments.continual.settings import StreamExperiment
from credo.experiments.continual.stream import HYBRID_FLOW, make_stream_experiment, run_stream_experiment

__all__ = [
    "HYBRID_FLOW",
    "KINDS",
    "Continual",
    "ContinualExperiment",
    "StreamExperiment",
    "learned_jointly",
    "make_continual",
    "make_learner",
    "make_stream_experiment",
    "make_tasks",
    "run_continual",
    "run_stream_experiment",
]
