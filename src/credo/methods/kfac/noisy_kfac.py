"""Noisy K-FAC: a matrix normal for each layer, by natural gradients with Kronecker factors as curvature.

With a layer's weight and bias as one matrix W, inputs a (a 1 behind them) and gradients g of single examples by the
outputs, A = E[a aᵀ] and G = E[g gᵀ] are running averages. N counts the data, δ is the prior's precision, τ the
temperature, δ̃ = τδ/N, γ the damping, γ' = γ + δ̃. Each step, at draws of W,

    m ← β₁m + ∇ + δ̃(M − M₀),    M ← M − lr·G'⁻¹ m A'⁻¹,    A' = A + π√γ'·I,    G' = G + √γ'/π·I

and q(W) is M + √(τ/N)·L_G E L_Aᵀ with standard normal E and L Lᵀ the inverses (Zhang et al. 2018, in the scaling of
Osawa et al. 2019; convolutions: Grosse and Martens 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizers import Rates
from credo.core.prior import Prior, Value
from credo.core.support.validate import checked_count
from credo.methods.kfac.groups import RENAMED, KroneckerCurvature
from credo.methods.kfac.stepper import KroneckerStepper
from credo.methods.natural.groups import Momentum, Warmup
from credo.methods.planning import COLDER, RISING_PART

# Of trainings of any length, where `fit` chooses it.
_TEMPERATURES = {"regression": 0.75, "classification": 0.6}
# Of noisy data: the damping makes its noise narrower than the posterior's.
_WARM = 1.5


class NoisyKFAC(KroneckerStepper):
    """Gaussian posterior whose weights are correlated within each layer: a matrix normal for each.

    Linear and convolution layers have Kronecker factors, all other parameters VOGN's diagonal. A prior precision that
    differs within a layer enters its noise by the mean. Parameters that are not random have neither noise nor prior.

    Args:
        model: The network; its parameters become the posterior mean.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs.
        prior: The Gaussian prior: an object, its standard deviation or its description; None: N(0, 1), or
            what `fit` chooses.
        prior_precision: Precision δ of a Gaussian prior about zero instead, also by parameter name globs.
        momentum: Weight β₁ of the old momentum, a `Momentum`, or a mapping of its fields.
        curvature: Weight of the old factors, a `KroneckerCurvature`, or a mapping of its fields.
        damping: γ, added to the factors; part of the noise's precision, too.
        clip: Bound on lr²·mᵀF⁻¹m, about twice the KL between a step's old and new predictions; None: no bound.
        draws: Draws a step, whose gradients are averaged.
        temperature: τ; below 1 the posterior is narrower, 1 is the exact one. None: `fit` chooses it for the task and
            the number of epochs, by two short trainings if these are many; 1 in a loop of your own. A `Warmup`, or a
            mapping of its fields, rises linearly. Data augmentation that is worth k times the data: `temperature=1/k`.
        random: Which parameters are random: `"all"` but the affine ones of normalisation layers, `"weights"`, `"last"`,
            name globs, or a predicate of name and parameter.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (1e-3, 3e-2), "temperature": (0.05, 1.0)}
    # Of both factors it is part of the damping: VOGN's 5 would keep small data sets from being fitted.
    planned_prior_precision: ClassVar[float] = 1.0
    tries_plans = True
    _renamed_arguments: ClassVar[Renamed] = RENAMED

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: Rates = 1e-2,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        momentum: Momentum | Mapping[str, Any] | float = Momentum(),
        curvature: KroneckerCurvature | Mapping[str, Any] | float = KroneckerCurvature(),
        damping: float = 1e-2,
        clip: float | None = 3e-3,
        draws: int = 1,
        temperature: Warmup | Mapping[str, Any] | float | None = None,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self._set_groups(momentum, curvature, damping, clip, temperature)
        self.step_draws = checked_count("draws", draws, what="draws a step")
        self._make_state(lr, prior, prior_precision, random)

    def _planned_temperature(self, steps: int, epochs: float) -> float:
        # It learns fast also in noise, and overfits fast without: warmer, and the same for short trainings.
        return _TEMPERATURES.get(self.likelihood.task, 1.0)

    def plan_as_(self, plan: str, *, steps: int, epochs: float, is_short: bool = False) -> None:
        """A temperature that rises to 1 throughout the training, or 1.5 from the start; constant in short trainings.

        Args:
            plan: `"cold"` or `"warm"`.
            steps: Steps of the training.
            epochs: Times that every example is seen, in the whole training.
            is_short: Whether the training is a short one, to compare the plans.
        """
        usual = self._planned_temperature(steps, epochs)
        planned: Any = _WARM
        if is_short:  # too short for a slow rise, and learns less of the noise
            planned = COLDER * usual if plan == "cold" else usual
        elif plan == "cold":
            planned = {"start": 0.01, "steps": max(1, int(RISING_PART * steps)), "to": 1.0}
        self._set_planned("temperature", planned)
        self.plan_training_(steps=steps, epochs=epochs)

    def draw(self) -> dict[str, Tensor]:
        """Means plus correlated noise for every random parameter; the mean before the first step."""
        noise = self._noise()
        means = parameters_at(self.model, self.vector.random)
        return {name: p + noise[name] if noise else p.clone() for name, p in means.items()}

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.vector.random).items()}

    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each weight by itself, √(τ/N · G'⁻¹ᵢᵢ A'⁻¹ⱼⱼ); zero before the first step."""
        random = [block for block in self.blocks if block.is_random]
        return self._by_name({b: (self.variance_scale * b.variance(b.current(b.inverses))).sqrt() for b in random})

    def describe(self) -> Description:
        """Prior, temperature, and what a draw needs of each layer: two roots, or eigenvectors and a root along them."""
        buffers = [item for block in self.blocks if block.is_random for item in block.named_buffers()]
        return Description(
            prior=self.prior,
            temperature=self.temperature,
            spread_count=sum(buffer.numel() for name, buffer in buffers if name.endswith(("root", "basis"))),
            has_curvature=self.has_curvature,
        )
