"""Find the rows of a batch that count in K-FAC's factors of inputs: those that count in the loss."""

from __future__ import annotations

from torch import Tensor

from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import Counted
from credo.core.per_example.output_rows import OutputGradients


class CountedRows:
    """Weights of a batch's rows.

    They are given, or all 1, or, where a loss is a mean over another number of rows, 0 for those without a gradient at
    the network's output.

    Args:
        counted: What the loss is a mean over.
        outputs: The network's outputs in the pass.
    """

    def __init__(self, counted: Counted, outputs: OutputGradients | None) -> None:
        self.counted, self._outputs = counted, outputs
        self._found: Tensor | None = counted.weights
        self._is_asked = False

    def examples(self, size: int) -> float:
        """n, the number that the mean was divided by."""
        return self.counted.of(size)

    def are_known(self, size: int) -> bool:
        """Whether `weights` can be asked for before the backward pass is over."""
        return not self.counted.chooses(size) or (self._outputs is not None and self._outputs.is_complete)

    def weights(self, size: int) -> Tensor | None:
        """How often each of `size` rows counts; None: once. Only once they are known, or the pass is over."""
        if not self._is_asked and self.counted.chooses(size):
            self._found = self._chosen(size)
        self._is_asked = True
        return self._found

    def _chosen(self, size: int) -> Tensor | None:
        rows = None if self._outputs is None else self._outputs.rows(size)
        if rows is None:
            raise UnsupportedModelError(
                f"examples={self.counted.examples:g} of {size} rows count, but which cannot be read from the network's "
                f"output, which does not begin with {size} rows or is not what the loss was computed from. Give "
                "weights=, with a 0 for each row that does not count."
            )
        return None if bool(rows.all()) else rows.double()

    def total(self, size: int) -> float:
        """The sum of all weights."""
        weights = self.weights(size)
        return float(size) if weights is None else float(weights.sum())
