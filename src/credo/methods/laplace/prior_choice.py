"""The prior and the noise of a Laplace approximation, where they are chosen by the evidence or by held-out data."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import CredoError, CredoWarning, PredictiveWarning, unknown
from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import GradientPosterior
from credo.core.prior import Gaussian, Prior, make_prior
from credo.core.support.user_warnings import warn
from credo.core.support.validate import is_number
from credo.core.thread_safety import changes_weights
from credo.methods.laplace.data_pass import has_one_noise
from credo.methods.laplace.evidence import HIGHEST, LOWEST, Evidence, Residuals, Search, best_scale, grouped
from credo.methods.laplace.structures import Diagonal, Structure

# Times the residuals' standard deviation from which on a noise is not believed.
_NOISE_FACTOR = 3.0
# Times the residuals' standard deviation from which on so much was fitted that its estimate is rough.
_FITTED_FACTOR = 2.0


class PriorChoice(GradientPosterior, ABC):
    """A Gaussian posterior N(θ*, P⁻¹), P = H/T + P₀, of which H is known, and P₀ given or chosen."""

    layout: Layout
    structure: Structure
    prior_evidence: Evidence
    temperature: float
    prior: Gaussian | None
    _fits_alone: bool
    """Whether the random weights are all that training fitted: else a learned noise is that of all, found in a pass."""
    totals: Tensor
    """Examples of the pass; for `data_size` examples their log-likelihood, squared residuals, and how many of these."""

    @property
    def has_curvature(self) -> bool:
        """Whether a pass over the data has been made since the last step."""
        return bool(self.totals[0] > 0)

    @property
    def precision(self) -> float | Tensor:
        """The diagonal of P₀: one number, or a vector over the random weights; infinite for pruned ones."""
        precision = 1.0 if self.prior is None else self.prior.std**-2
        return precision if self.kept is None else torch.where(self._kept_weights(), precision, math.inf)

    @torch.no_grad()
    def log_marginal_likelihood(self) -> float:
        """log p(D), in nats: log p(D|θ*)/T − ½(log|P| − log|P₀| + (θ* − μ₀)ᵀP₀(θ* − μ₀)).

        For `data_size` examples, if the pass saw another number of them.
        """
        self._check_curvature()
        squares = self._offset().double().square() * self.precision
        scatter = float(squares.nan_to_num(0.0).sum())  # of pruned weights 0·∞
        return float(self.totals[1]) / self.temperature - 0.5 * (self.structure.log_det_ratio() + scatter)

    @changes_weights
    def tune_prior_(
        self, groups: str | None = None, *, by: str = "evidence", nll: Callable[[Self], float] | None = None
    ) -> Self:
        """Choose the prior's precision for the weights and the curvature as they are; returns itself.

        Args:
            groups: Weights that share a precision: `"one"`, `"layer"` or `"tensor"`; None: as in `evidence`.
            by: `"evidence"`, which also finds a learned noise that all outputs share if all weights are random; or
                `"validation"`, which then multiplies these precisions by the factor with the lowest `nll`.
            nll: With `by="validation"`, a function of this posterior: the negative log-likelihood of held-out data
                under its predictions.
        """
        self._check_curvature()
        if by not in ("evidence", "validation"):
            raise ValueError(unknown("by", str(by), ("evidence", "validation")))
        if (nll is None) is (by == "validation"):
            raise ValueError("by='validation' needs nll=, a function of the posterior; by='evidence' takes none.")
        with self.guard.exclusive(self):
            self._maximise_evidence(groups or self.prior_evidence.groups, noise=self._fits_alone)
            self._refresh()
        if nll is not None:
            self._minimise(nll)
        return self

    @changes_weights
    def scale_prior_(self, factor: float) -> Self:
        """Multiply the prior's precision, for the weights and the curvature as they are; returns itself.

        Args:
            factor: A positive number.
        """
        if not (is_number(factor) and 0 < factor < math.inf):
            raise ValueError(f"factor={factor!r} must be a positive number.")
        if self.prior is None:
            raise CredoError("There is no prior yet: give prior=, or call posterior.fit(loader) first.")
        self._scale(self.prior, factor)
        return self

    def _scale(self, prior: Gaussian, factor: float) -> None:
        with self.guard.exclusive(self):
            self._take_prior(Gaussian(prior.mean, prior.std * factor**-0.5))
            self._refresh()

    def _maximise_evidence(self, groups: str | None, *, noise: bool) -> None:
        """Set the precisions of these groups (None: leave the prior), and with `noise` the noise if it is learned."""
        residuals = self._residuals() if noise else None
        search = Search(self.structure, self.temperature, residuals)
        if groups is not None:
            members = grouped(self.layout.names, groups)
            found = search.over_groups(members, self._offset())
            self._set_precisions(dict(zip(members, found.precisions.tolist(), strict=True)))
        elif residuals is not None:
            found = search.over_noise(self.precision)
        if residuals is not None and found.variance is not None:
            self._take_noise(residuals, found.variance)
            self._warn_of_noise(found.variance**0.5, self._residual)

    def _find_noise(self, spectrum: Tensor, squares: float) -> None:
        """Set a learned noise by what all weights have fitted, where others than the random ones were trained.

        Args:
            spectrum: Eigenvalues of JᵀJ of an example, by all weights.
            squares: Σ θ² of these.
        """
        residuals = self._residuals()
        assert residuals is not None
        search = Search(self.structure, self.temperature, residuals)
        found = search.over_spectrum(spectrum * (self.data_size / residuals.variance), squares)
        assert found.variance is not None
        self._take_noise(residuals, found.variance)
        noise, residual = found.variance**0.5, self._residual
        if noise > _FITTED_FACTOR * residual:
            warn(
                f"The network has fitted much of the noise of its training rows: their residuals have a standard "
                f"deviation of {residual:.3g}, and the evidence of all weights gives {noise:.3g}, which is used. "
                "Intervals may still be too narrow: call credo.calibrate(posterior, held_out).",
                PredictiveWarning,
            )

    def _take_noise(self, residuals: Residuals, variance: float) -> None:
        assert has_one_noise(self.likelihood)
        self.likelihood.set_variance_(torch.tensor(variance))
        self.structure.scale_(residuals.variance / variance)  # which is proportional to 1/σ²
        self.totals[1] = residuals.log_likelihood(variance)

    @property
    def _residual(self) -> float:
        """Standard deviation of the residuals."""
        return math.sqrt(self.totals[2] / self.totals[3])

    def _warn_of_noise(self, noise: float, residual: float) -> None:
        """Warn if the evidence explains by noise what is no noise: its curvature is too rough for these weights."""
        if noise > _NOISE_FACTOR * residual:
            warn(
                f"The evidence chose noise of standard deviation {noise:.3g}, but the residuals on the training rows "
                f"have {residual:.3g}: intervals will be too wide. Call credo.calibrate(posterior, held_out), give the "
                "noise, credo.GaussianNoise(std), or take another structure= or random='last'.",
                PredictiveWarning,
            )

    def _residuals(self) -> Residuals | None:
        if not (has_one_noise(self.likelihood) and self.likelihood.learn):
            return None
        std = F.softplus(self.likelihood.noise_rho.detach().double())
        return Residuals(float(self.totals[2]), float(self.totals[3]), float(std.square()))

    def _minimise(self, nll: Callable[[Self], float]) -> None:
        """Multiply the prior's precision by the factor with the lowest `nll`."""
        assert self.prior is not None
        chosen = self.prior

        def tried(factor: float) -> float:
            self._scale(chosen, factor)
            return nll(self)

        self._scale(chosen, best_scale(tried))

    # -- the prior ---------------------------------------------------------------------------------------------------

    def _set_precisions(self, found: Mapping[tuple[str, ...], float]) -> None:
        """Use a prior with these precisions about the mean that it has."""
        at_bound = [group for group, value in found.items() if not 1.01 * LOWEST < value < 0.99 * HIGHEST]
        if at_bound:
            warn(
                f"The evidence has no maximum for the prior precision of {', '.join(at_bound[0][:3])}: the data say "
                f"nothing about these weights, or they are all zero. It is set to {found[at_bound[0]]:g}; give prior=.",
                CredoWarning,
            )
        stds = {name: value**-0.5 for group, value in found.items() for name in group}
        mean = 0.0 if self.prior is None else self.prior.mean
        self._take_prior(Gaussian(mean, next(iter(stds.values())) if len(found) == 1 else stds))

    def _take_prior(self, prior: Gaussian) -> None:
        """Use a prior that was chosen; it is part of configuration and state."""
        bound = self._bound(prior)
        self._set_planned("prior", bound.config())
        self.prior = bound

    def _set_planned(self, name: str, value: Any) -> None:
        super()._set_planned(name, value)
        if name == "prior":
            self.prior = self._bound(value)  # its vectors are loaded after this

    def _bound(self, prior: Prior | Mapping[str, Any] | float) -> Gaussian:
        bound = make_prior(prior).bind(self.layout, data_size=self.data_size, device=self.device)
        if type(bound) is not Gaussian:
            raise ValueError(f"{type(self).__name__} needs a Gaussian prior; got {type(bound).__name__}.")
        return bound

    # -- inner -------------------------------------------------------------------------------------------------------

    def _means(self) -> dict[str, nn.Parameter]:
        return parameters_at(self.model, self.layout.names)

    def _offset(self) -> Tensor:
        """θ* − μ₀."""
        return self.layout.flatten(self._means()).detach() - (0.0 if self.prior is None else self.prior.mean)

    def _kept_weights(self) -> Tensor:
        """Which of the random weights are not pruned, [weights]."""
        return self.layout.flatten(self.masks()) > 0

    def _refresh(self) -> None:
        """Find the root of P⁻¹ anew, if there is a curvature."""
        if not self.has_curvature:
            return
        if self.kept is not None and isinstance(self.structure, Diagonal):
            self.structure.curvature = self.structure.curvature * self._kept_weights()
        self.structure.update_(self.precision, self.temperature)

    def _check_curvature(self) -> None:
        if not self.has_curvature:
            raise CredoError(
                "There is no curvature yet, or a step has been made since: call posterior.fit(loader) first."
            )
