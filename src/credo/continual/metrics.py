"""How well a sequence of tasks was learned, from the matrix a[i][j]: accuracy on task j after learning task i.

Rows may be as long as the tasks seen so far: what is above the diagonal is not used.
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
    """BWT: by how much later tasks changed the accuracy on earlier ones; negative is forgetting, 0 for one task."""
    _check(matrix)
    changes = [matrix[-1][task] - matrix[task][task] for task in range(len(matrix) - 1)]
    return sum(changes) / len(changes) if changes else 0.0


def forward_transfer(matrix: Matrix, alone: Sequence[float]) -> float:
    """FWT: by how much earlier tasks helped: accuracy on each task when it was learned, less that of learning it alone.

    `alone[j]` is the accuracy of the same network trained on task j only; the first task does not count.
    """
    _check(matrix)
    if len(alone) < len(matrix):
        raise ValueError(f"alone has {len(alone)} accuracies for {len(matrix)} tasks: one for each is needed.")
    gains = [matrix[task][task] - alone[task] for task in range(1, len(matrix))]
    return sum(gains) / len(gains) if gains else 0.0


def _check(matrix: Matrix) -> None:
    if not matrix or any(len(row) <= index for index, row in enumerate(matrix)):
        raise ValueError("Row i of the matrix needs the accuracies on tasks 0 to i; there must be a row.")
