"""Posteriors inside other people's training loops: Hugging Face's Trainer, Lightning, loggers.

None of these packages is a dependency: `BayesTrainer` and `BayesCallback` are made when they are first asked for.
"""

from functools import cache
from typing import Any

from credo.integrations.logs import log_to

__all__ = ["BayesCallback", "BayesTrainer", "log_to"]


@cache
def __getattr__(name: str) -> Any:
    """The classes that derive from another package's."""
    if name == "BayesTrainer":
        from credo.integrations.hugging_face import bayes_trainer

        return bayes_trainer()
    if name == "BayesCallback":
        from credo.integrations.lightning import bayes_callback

        return bayes_callback()
    raise AttributeError(f"module 'credo.integrations' has no attribute {name!r}")
