"""Priors over weights: `credo.priors.Gaussian(0.0, 1.0)`, `ScaleMixture(0.5, 1.0, 0.1)` and others."""

from credo.core.prior import Gaussian, Laplace, LayerL2, Prior, ScaleMixture

__all__ = ["Gaussian", "Laplace", "LayerL2", "Prior", "ScaleMixture"]
