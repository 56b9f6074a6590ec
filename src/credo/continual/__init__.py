"""Continual learning: yesterday's posterior is today's prior."""

from credo.continual.gaussian_algebra import Belief, belief_of, compare, merge
from credo.continual.joint import learn_jointly
from credo.continual.learner import CARRIES, Learner
from credo.continual.metrics import backward_transfer, forward_transfer, mean_accuracy
from credo.continual.sequence import Sequel, run_sequence
from credo.continual.tasks import Task, permuted_tasks, split_tasks, tasks_of

__all__ = [
    "CARRIES",
    "Belief",
    "Learner",
    "Sequel",
    "Task",
    "backward_transfer",
    "belief_of",
    "compare",
    "forward_transfer",
    "learn_jointly",
    "mean_accuracy",
    "merge",
    "permuted_tasks",
    "run_sequence",
    "split_tasks",
    "tasks_of",
]
