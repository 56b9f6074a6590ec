"""Errors and warnings that Credo raises, and their shared wording."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CredoError(Exception):
    """Base class of Credo's errors."""


class UnsupportedModelError(CredoError, ValueError):
    """The network is not supported by the method; the message lists every problem found."""


class InputsError(CredoError, ValueError, RuntimeError):
    """The network cannot run on inputs of this type or shape; the message says what it takes."""


class NonFiniteError(CredoError, ArithmeticError):
    """A loss, gradient or prediction is NaN or infinite; parameters are those of the last successful step."""


class NonFiniteRowsError(NonFiniteError):
    """Inputs or targets are NaN or infinite already; the message names their rows."""


class MissingPackageError(CredoError, ImportError):
    """Something needs a package that is not installed; the message has the command that installs it."""


class CredoWarning(UserWarning):
    """Base class of Credo's warnings."""


class DivergenceWarning(CredoWarning):
    """Training diverges, though all values are finite; the message names the arguments to change."""


class DataSizeWarning(CredoWarning):
    """`data_size` is far from the number of examples in the loader, so prior and data are weighted wrongly."""


class ExampleCountWarning(CredoWarning):
    """A loss does not seem to be a mean over all rows, or rows of a batch depend on each other: curvature is wrong."""


class LikelihoodWarning(CredoWarning):
    """The network's outputs are not what the likelihood takes, such as probabilities where it takes logits."""


class CheckpointWarning(CredoWarning):
    """A checkpoint was damaged or written under other conditions; training resumes nevertheless."""


class DataWarning(CredoWarning):
    """Some of the data cannot be learned from, such as categories that only test rows have."""


class CalibrationWarning(CredoWarning):
    """A calibration was dropped, because the weights that it was chosen for have changed."""


class FewRowsWarning(CredoWarning):
    """There are too few held-out rows for a guarantee; the message says how many are needed."""


class PredictiveWarning(CredoWarning):
    """Predictions are worse than others that the posterior can make, or not those of its conformal thresholds."""


class ReusedRowsWarning(CredoWarning):
    """Held-out rows are used again for something that needs fresh ones; the message says what to do."""


class LostProcessError(CredoError, RuntimeError):
    """Another process of the group was lost or timed out; parameters are those of the last step."""


class FileFormatError(CredoError, ValueError):
    """A saved file is truncated or modified, or belongs to another version or architecture."""


def unknown(kind: str, given: str, possible: Iterable[str], meant: str | None = None) -> str:
    """Error message for an unknown name: what was given, the closest valid name, all possible ones.

    Args:
        kind: What the name denotes, for instance "optimizer".
        given: The unknown name.
        possible: All valid names.
        meant: The one that is meant, where it is known; None: the closest.
    """
    names = sorted(possible)
    near = [meant] if meant else difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {kind} {given!r}.{hint} Possible: {', '.join(names)}."
