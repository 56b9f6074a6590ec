"""Metrics of continual learning, from the matrix a[i][j]: accuracy on task j after learning task i.

Entries above the diagonal are not used, so that row i may have only i + 1 entries.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def mean_accuracy(matrix: Matrix) -> float:
    """ACC: accuracy after the last task, averaged over all tasks."""
    _check(matrix)
    last = matrix[-1][: len(matrix)]
    return sum(last) / len(last)


def backward_transfer(matrix: Matrix) -> float:
    """BWT: mean change of the accuracy on earlier tasks by later ones; negative is forgetting, 0 for one task."""
    _check(matrix)
    changes = [matrix[-1][task] - matrix[task][task] for task in range(len(matrix) - 1)]
    return sum(changes) / len(changes) if changes else 0.0


def forward_transfer(matrix: Matrix, alone: Sequence[float]) -> float:
    """FWT: mean gain on a task by earlier tasks, over training on it alone; the first task does not count.

    Args:
        matrix: Accuracies, as above.
        alone: Accuracy on each task of the same network trained on that task only.
    """
    _check(matrix)
    if len(alone) < len(matrix):
        raise ValueError(f"alone has {len(alone)} accuracies for {len(matrix)} tasks: one for each is needed.")
    gains = [matrix[task][task] - alone[task] for task in range(1, len(matrix))]
    return sum(gains) / len(gains) if gains else 0.0


def _check(matrix: Matrix) -> None:
    if not matrix or any(len(row) <= index for index, row in enumerate(matrix)):
        raise ValueError("Row i of the matrix needs the accuracies on tasks 0 to i; there must be a row.")
