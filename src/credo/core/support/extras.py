"""Packages that only some of Credo needs, and the error where one is missing.

Training, saving and predicting need torch, NumPy and safetensors alone. Everything else is imported where it is used,
within `needs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credo.core.errors import MissingPackageError

INSTALLED_AS = {"PIL": "pillow", "sklearn": "scikit-learn"}  # where the name of the import is another


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Import in this context: a missing package raises `MissingPackageError`, with the command that installs it.

    Args:
        extra: The extra of `pip install 'credo[extra]'` that has the package.
        what: What needs it, at the start of a sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "credo"):
            raise
        package = INSTALLED_AS.get(package, package)
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed: pip install 'credo[{extra}]'"
        ) from error
