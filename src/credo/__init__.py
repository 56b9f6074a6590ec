"""Bayesian neural networks for any torch module: calibrated probabilities and honest uncertainty.

A posterior is a module around your untouched network; it can draw weights, make one update step, and predict.

The names are those of `credo.api`, which is imported, and torch with it, when the first of them is used: `credo
--version` and the completion of a command line need neither.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from credo.version import __version__ as __version__

if TYPE_CHECKING:
    from credo.api import *  # noqa: F403


class _Package(ModuleType):
    """`credo.predict` is the function: importing the folder of that name does not replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "predict" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    missing = AttributeError(f"module 'credo' has no attribute {name!r}")
    if name.startswith("__") and name != "__all__":  # what Python itself looks for
        raise missing
    api = import_module("credo.api")
    if not hasattr(api, "RENAMED"):  # this thread is importing it, and asks for a submodule
        raise missing
    globals().update({one: getattr(api, one) for one in api.__all__}, __all__=api.__all__)
    if name in globals():
        return globals()[name]
    if name not in api.RENAMED:
        raise missing
    thing, new = api.RENAMED[name]
    api.warn(f"credo.{name} is now {new}; the old name goes in 0.3.", DeprecationWarning)
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("credo.api").__all__})
