"""The KL of a mean-field Gaussian from its prior, in nats: closed forms and the Monte-Carlo estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.prior import HALF_LOG_2PI, LayerL2, Prior, make_prior

KL_NAMES = ("auto", "closed", "monte-carlo", "ard")


def uses_closed_form(prior: Prior, choice: str, like: Tensor) -> bool:
    """Whether the KL is computed in closed form; raises ValueError if the choice does not fit the prior.

    Args:
        prior: The prior, bound to a layout.
        choice: One of `KL_NAMES`.
        like: A vector with the entries of the random weights.
    """
    if choice not in KL_NAMES:
        raise ValueError(unknown("kl_term.estimator", choice, KL_NAMES))
    if isinstance(prior, LayerL2):
        raise ValueError("LayerL2 is a penalty, not a distribution: use it with MAP, or give BBB a Gaussian prior.")
    one = torch.ones_like(like)
    has_closed_form = prior.kl(one, one) is not None
    if choice == "closed" and not has_closed_form:
        raise ValueError(f"{type(prior).__name__} has no closed-form KL: use kl_term='auto' or 'monte-carlo'.")
    return has_closed_form and choice != "monte-carlo"


def ard_kl(mean: Tensor, std: Tensor) -> Tensor:
    """½ Σ log(1 + μ²/σ²): the KL from N(0, s²) with the best s² = μ² + σ² for each weight.

    Automatic relevance determination by empirical Bayes.
    """
    return 0.5 * torch.log1p((mean / std).square()).sum()


def relative_ard_kl(log_alpha: Tensor) -> Tensor:
    """`ard_kl` for σ² = αμ²: ½ Σ log(1 + 1/α), the KL that Shridhar et al. (2019) trained with.

    Independent of the means, also where rounding would make `ard_kl` depend on means that are nearly zero.
    """
    return 0.5 * F.softplus(-log_alpha).sum()


class FittedPrior(Prior):
    """N(0, μ² + σ²), the prior of `ard_kl`: it is fitted to each weight and follows the training."""

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """½ Σ log(1 + μ²/σ²)."""
        return ard_kl(mean, std)

    def moments_for(self, mean: Tensor, std: Tensor) -> tuple[float, Tensor]:
        """0 and √(μ² + σ²)."""
        return 0.0, torch.hypot(mean, std)

    def log_prob(self, weights: Tensor) -> Tensor:
        """Raise ValueError: the density depends on μ and σ."""
        raise _nothing_fixed("density")

    @property
    def std(self) -> float:
        """Raise ValueError: it depends on μ and σ, see `moments_for`."""
        raise _nothing_fixed("standard deviation")

    def config(self) -> dict[str, Any]:
        """Its kind; it is made by `kl_term="ard"`."""
        return {"kind": "fitted"}


def _nothing_fixed(what: str) -> ValueError:
    return ValueError(
        f"kl_term='ard' fits a prior to each weight, so the prior has no {what} before the weights are initialised: "
        "give init={'mean': 'he'} or a number there, or choose a prior and kl_term='auto'."
    )


def prior_for(choice: str, given: Any) -> Prior:
    """The prior: `FittedPrior` for `choice="ard"`, else what was given."""
    if choice != "ard":
        return make_prior(given)
    if given is not None:
        raise ValueError("kl_term='ard' fits a prior to each weight: leave prior out, or choose kl_term='auto'.")
    return FittedPrior()


def monte_carlo_kl(prior: Prior, mean: Tensor, std: Tensor, eps: Tensor) -> Tensor:
    """log q(w) − log p(w) at w = `mean` + `std`·`eps`, under the `prior` p."""
    log_q = -0.5 * eps.square().sum() - std.log().sum() - eps.numel() * HALF_LOG_2PI
    return log_q - prior.log_prob(torch.addcmul(mean, std, eps))
