"""Bayesian neural networks for any torch module."""

from credo.version import __version__

__all__ = ["__version__"]
