"""Bayes by Backprop: mean-field variational inference by gradient descent.

q(w) = N(μ, σ²) for each random weight, σ = softplus(ρ) or √α·|μ|. Each step minimises the negative ELBO per example,

    mean NLL(w) + (temperature · weight(step) / data_size) · KL(q ‖ p),        w = μ + σ·ε, ε ~ N(0, 1),

(Graves 2011; Blundell et al. 2015), where the noise enters as one weight draw for the batch, by local
reparameterisation (Kingma et al. 2015) or by Flipout (Wen et al. 2018). The network's own parameters are μ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.deferred import Number
from credo.core.description import Description, WeightState
from credo.core.distributed.batch_shard import WHOLE
from credo.core.divergence import compare_draw
from credo.core.kernels import flat
from credo.core.kl_schedule import RENAMED_KL, KLTerm, constant
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.flat_layout import Layout
from credo.core.network.inplace_inputs import same_inputs
from credo.core.network.selection import Random, all_names, one_device, random_names
from credo.core.network.substitute import parameters_at, substituted
from credo.core.optimizer_step import GradientPosterior, OptimizerStep, plain_name, trainable
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.posterior import GaussianPosterior, Nll, Terms
from credo.core.prior import PRECISION, Gaussian, Prior
from credo.core.support.validate import checked_count
from credo.methods.adversarial_sampling import weight_gradients
from credo.methods.bbb.activation_noise import noisy_loss
from credo.methods.bbb.gradient_buffers import GaussianGradients, TorchGradients
from credo.methods.bbb.init import Init, initial_rho, initialise_mean_, scale_first_
from credo.methods.bbb.kl import KL_NAMES as KL_NAMES
from credo.methods.bbb.kl import monte_carlo_kl, prior_for, relative_ard_kl, uses_closed_form
from credo.methods.bbb.std_parameterization import RelativeStd, SoftplusStd, make_spread
from credo.methods.bbb.step_noise import NOISE_NAMES as NOISE_NAMES
from credo.methods.bbb.step_noise import Noise, chosen_noise
from credo.methods.planning import COLDER, WARM, checked_temperature, planned_noise, planned_temperature

# Default learning rates: σ changes more slowly than the means, which find the function before the noise grows.
_MEAN_RATE = 1.5e-2
RATES: Rates = {"rho": 1e-2, "*": _MEAN_RATE}


class BBB(GradientPosterior, GaussianPosterior):
    """Mean-field Gaussian posterior trained by the reparameterisation trick.

    Prediction always draws weights, whatever `noise` training uses.

    Args:
        model: The network; its own parameters are the means μ.
        data_size: Number of training examples, which the KL is divided by.
        prior: An object, its description, or a Gaussian's standard deviation; None: N(0, 1). `prior_precision=`, a
            Gaussian's precision about zero, is accepted instead.
        noise: How training samples: `"weights"` takes one draw for the batch. `"lrt"` and `"flipout"` give each example
            noise of its own, with less gradient variance; layers not covered, tied or reused take the weight draw.
            `AdversarialSampling(...)` adds the worst weights near each draw.
        draws: Passes a step, averaged; more of them lower the gradient variance at their cost.
        temperature: Factor on the KL: 1 is the Bayes posterior, less is a cold one. None: `fit` chooses it for the task
            and the number of epochs, by two short trainings if these are many; 1 in a loop of your own.
        kl_term: How the KL is computed and weighted: a `KLTerm`, a mapping of its fields, or the name of an estimator
            (`"auto"`, `"closed"`, `"monte-carlo"`, `"ard"`).
        spread: `"free"`: σ = softplus(ρ). `"relative"`: σ = √α·|μ| with a learned α of each weight, `"relative-layer"`
            of each tensor (Shridhar et al. 2019).
        random: Which parameters have a posterior, as in `random_names`; all others are trained as points.
        init: Means and standard deviations before training: an `Init`, a mapping of its fields, or the first σ.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser. A weight decay leaves ρ out.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs, among them `"rho"` and
            `"likelihood.*"`: `{"rho": 1e-2, "*": 1e-3}`; 1.5e-2, and 1e-2 for ρ, by default.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    can_defer_checks = tries_plans = True
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (1e-3, 3e-2), "temperature": (0.01, 1.0)}
    _not_in_config = ("init",)
    _renamed_arguments: ClassVar[Renamed] = {
        "mean_init": "init.mean",
        "std_init": "init.std",
        "relative_std": "init.relative_std",
        "rho_init": "init.rho",
        **RENAMED_KL,
        **RENAMED_OPTIMIZER,
        "prior_precision": PRECISION,
    }
    prior: Prior

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        prior: Prior | Mapping[str, Any] | float | None = None,
        noise: Noise = "weights",
        draws: int = 1,
        temperature: float | None = None,
        kl_term: KLTerm | Mapping[str, Any] | str = KLTerm(),
        spread: str = "free",
        random: Random = "all",
        init: Init | Mapping[str, Any] | float = Init(),
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = RATES,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self.attack, self.noise_name = chosen_noise(noise)
        self.arguments["noise"] = self.attack or noise
        self.can_compile = self.noise_name == "weights"  # others are noise inside the layers
        self.step_draws = checked_count("draws", draws, what="draws a step")
        self.temperature = 1.0 if temperature is None else checked_temperature(temperature)
        kl_term, init = KLTerm.of(kl_term), Init.of(init)
        self.kl_weight = kl_term.schedule()
        parameters = parameters_at(model, random_names(model, random))
        self.layout = Layout(parameters, known=all_names(model))
        self.arguments["random"] = list(self.layout.names)
        device = one_device(parameters)
        self.prior = prior_for(kl_term.estimator, prior).bind(self.layout, data_size=self.data_size, device=device)
        self.kl_name, self.spread = kl_term.estimator, make_spread(spread)
        like = torch.empty(self.layout.size, device=self.device, dtype=self.layout.dtype)
        self.closed_form = uses_closed_form(self.prior, self.kl_name, like)
        initialise_mean_(parameters, init.mean, self.prior, self.layout, self.generator)
        mean = self.layout.flatten(parameters).detach()
        self.rho = nn.Parameter(initial_rho(self.spread, mean, init, self.generator, self.layout))
        self._by_weight: set[str] = set()
        if lr == RATES and callable(Optimizer.of(optimizer).name):
            lr = _MEAN_RATE  # a function gives its groups rates of its own
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr, locate=self._locate, undecayed=("rho",))

    @classmethod
    def from_pretrained(cls, model: nn.Module, *, relative_std: float | None = None, **options: Any) -> BBB:
        """Start from trained weights: μ is the weights, σ is `relative_std`·|μ| (Krishnan et al. 2020).

        Args:
            model: The trained network; its running statistics stay.
            relative_std: First σ/|μ|; a tenth unless `options` have an `init` of their own.
            options: Further arguments of `BBB`.
        """
        own = {"init", "std_init", "rho_init"} & {*options}
        if own and relative_std is not None:
            raise ValueError(f"relative_std and {', '.join(own)} were given: they exclude each other.")
        first: dict[str, Any] = (
            {} if own else {"init": Init(relative_std=0.1 if relative_std is None else relative_std)}
        )
        return cls(model, **first, **options)

    # -- the distribution ------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """μ + σ·ε for every random parameter."""
        compiled = self._compiled_draws()
        return self.layout.split(torch.addcmul(*self._moments(), self._normal())) if compiled is None else compiled()

    def _drawer(self) -> Callable[[], dict[str, Tensor]]:
        """Draws from the means as they are now, also while another draw is in their place."""
        is_own = getattr(self.draw, "__func__", None) is BBB.draw  # not that of a subclass
        return (self._compiled_draws() if is_own else None) or self.draw

    def _compiled_draws(self) -> flat.SoftplusDraws | None:
        if not isinstance(self.spread, SoftplusStd) or torch.is_grad_enabled():
            return None
        generator, means = self.generator, parameters_at(self.model, self.layout.names)
        pieces = [*means.values()] if self.layout.is_whole else self.layout.pieces(means)
        if not flat.fused([*pieces, self.rho]):
            return None
        split = partial(flat.split, like=means) if self.layout.is_whole else self.layout.split
        return flat.SoftplusDraws(pieces, self.rho, generator, split)

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.layout.names).items()}

    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations, softplus(ρ) or √α·|μ|."""
        with torch.no_grad():
            return self.layout.split(self._moments()[1])

    @torch.no_grad()
    def scale_noise_(self, factor: float) -> bool:
        """Multiply every σ by `factor`."""
        self.rho.copy_(self.spread.scaled(self.rho, factor))
        return True

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats, summed over all random weights; one Monte-Carlo draw where no closed form is used."""
        mean, std = self._moments()
        if self.closed_form:
            return self._closed_kl(mean, std, self.rho)
        return self._monte_carlo_kl(mean, std, self.rho, self._normal())

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune permanently: ρ and the prior lose their entries, gradients and optimiser leave pruned means at zero.

        Args:
            masks: For each parameter which weights stay, by name.
        """
        kept = self._keep(masks)
        self.layout, chosen = self.layout.narrowed(kept)
        self.prior = self.prior.at(chosen)
        self.optimizer_step.keep_({f"model.{name}": mask for name, mask in kept.items()})
        if self.spread.per_weight:
            self.optimizer_step.narrow_("rho", chosen)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """μ and σ as flat vectors, differentiable."""
        mean = self.layout.flatten(parameters_at(self.model, self.layout.names))
        return mean, self.spread.std(mean, self.rho, self.layout)

    def _normal(self) -> Tensor:
        return flat.normal(self.layout.size, self.generator, device=self.rho.device, dtype=self.rho.dtype)

    def _closed_kl(self, mean: Tensor, std: Tensor, rho: Tensor) -> Tensor:
        if self.kl_name == "ard" and isinstance(self.spread, RelativeStd):
            return relative_ard_kl(self.spread.log_alpha(rho, self.layout))
        kl = self.prior.kl(mean, std)
        assert kl is not None  # as `closed_form` tells
        return kl

    def _monte_carlo_kl(self, mean: Tensor, std: Tensor, rho: Tensor, eps: Tensor) -> Tensor:
        return monte_carlo_kl(self.prior, mean, std, eps)

    # -- training --------------------------------------------------------------------------------------------

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose the temperature for `epochs` epochs and the first σ for `steps` steps, if both were left open."""
        if self.arguments["temperature"] is None:
            self._plan(planned_temperature(self.likelihood.task, epochs), planned_noise(steps))

    def plan_as_(self, plan: str, *, steps: int, epochs: float, is_short: bool = False) -> None:
        """Cold: a tenth of the usual temperature in a short training, and the usual one. Warm: 1, more first noise."""
        usual = planned_temperature(self.likelihood.task, epochs)
        temperature = max(WARM, usual) if plan == "warm" else usual * (COLDER if is_short else 1)
        self._plan(temperature, planned_noise(steps) * (temperature / usual) ** 0.5)

    def _plan(self, temperature: float, first_noise: float) -> None:
        self._set_planned("temperature", temperature)
        if self.arguments["init"] == Init() and isinstance(self.spread, SoftplusStd):
            scale_first_(self.rho, first_noise)

    def _set_planned(self, name: str, value: Any) -> None:
        super()._set_planned(name, value)
        self.temperature = value

    def _gradients(self, nll: Nll) -> Terms:
        """Set the gradients of the negative ELBO per example, averaged over the draws.

        Each pass is differentiated by the weights drawn alone; the chain rule to (μ, ρ) is applied by hand after it has
        freed its activations, which saves autograd's own graph and temporaries over all weights.
        """
        kl_weight = self.temperature / self.data_size
        if self.kl_weight is not constant:
            kl_weight = self.temperature * self.kl_weight(self.steps) / self.data_size
        if self.attack is not None:
            kl_weight *= self.attack.kl_share()
        passes, draws = self._passes(), self.step_draws
        generator, net = self.generator, self._net
        if len(passes) > 1 or self.attack is not None or self.noise_name != "weights":
            nll = same_inputs(nll)
        gradients = self._gradient_buffer(kl_weight)
        data_term: Number = 0.0
        kl: Number = 0.0
        for index, (fraction, is_attacked, frozen) in enumerate(passes):
            if is_attacked:
                weights = gradients.draw_at(self._worst_noise(nll, net, gradients, index % draws))
            else:
                if self.process_group is not None:
                    self.process_group.begin_pass(self, index, draws)
                weights = gradients.draw(generator)
            std = None if self.noise_name == "weights" else gradients.moments()[1].detach().requires_grad_()
            backward = partial(self.optimizer_step.backward, at=self.steps, fraction=fraction, drawn=weights)
            with frozen_statistics(net) if frozen else nullcontext():
                if std is not None:
                    loss = backward(self._noisy_nll(nll, net, weights, std))
                else:
                    # Backward with the draw still in place: checkpointed parts of a network run again there.
                    with substituted(net, weights, self._aliases, original=self.model):
                        loss = backward(nll(net))
            data_term = loss * fraction + data_term
            if not gradients.add(weights, None if std is None else std.grad) and std is None:
                self.guard.check_used(False)
            if not self.closed_form and index < draws:
                # At the plain draws; without any, at draws of its own.
                eps = self._normal() if is_attacked else gradients.eps
                kl = gradients.add_kl(partial(self._monte_carlo_kl, eps=eps), kl_weight / draws) / draws + kl
            del weights, std, backward  # not held during the next pass
        if self.closed_form:
            numbers = self.prior.numbers if type(self.prior) is Gaussian else None
            if numbers is None:
                kl = gradients.add_kl(self._closed_kl, kl_weight)
            else:
                kl = gradients.add_gaussian_kl(numbers, kl_weight)
        kl = kl if self._checks.is_open else float(kl)
        squared_norm, normed = gradients.assign(), gradients.parameters
        del gradients

        penalty = kl * kl_weight
        self.optimizer_step.check(data_term + penalty, at=self.steps)
        if not self._watch.compared and self.attack is None:  # which looks for the worst weights near a draw
            compare_draw(self, data_term, nll)
        data_term, kl = self.optimizer_step.ready(
            at=self.steps,
            losses=(data_term, kl),
            squared_norm=squared_norm or 0.0,
            normed=() if squared_norm is None else normed,
        )
        penalty = kl * kl_weight
        return Terms(loss=data_term + penalty, nll=data_term, penalty=penalty, kl=kl)  # type: ignore[arg-type]

    def _passes(self) -> list[tuple[float, bool, bool]]:
        """For each pass of a step its fraction of the loss, if it is adversarial, if it leaves running statistics."""
        attacked = 0.0 if self.attack is None else self.attack.weight
        plain = [((1 - attacked) / self.step_draws, False)] * self.step_draws if attacked < 1 else []
        passes = plain + ([(attacked / self.step_draws, True)] * self.step_draws if attacked > 0 else [])
        all_count = self.attack is not None and attacked > 0 and self.attack.attack_statistics
        return [(*one, index > 0 and not all_count) for index, one in enumerate(passes)]

    def _gradient_buffer(self, kl_weight: float) -> GaussianGradients:
        means = parameters_at(self.model, self.layout.names)
        prior = self.prior.numbers if type(self.prior) is Gaussian else None
        is_common = self.noise_name == "weights" and self.closed_form and isinstance(self.spread, SoftplusStd)
        if prior and is_common and self.kept is None and flat.fused([*means.values(), self.rho]):
            return flat.CompiledGradients(means, self.rho, prior, kl_weight)
        return TorchGradients(means, self.rho, self.spread, self.layout)

    def _noisy_nll(self, nll: Nll, net: nn.Module, weights: dict[str, Tensor], std: Tensor) -> Tensor:
        common: dict[str, Any] = {"aliases": self._aliases, "by_weight": self._by_weight, "generator": self.generator}
        common["rows"] = WHOLE if self.process_group is None else self.process_group.rows
        stds, check = self.layout.split(std), self.guard.check_used
        return noisy_loss(nll, net, self.noise_name, weights, stds, check_used=check, **common)

    def _worst_noise(self, nll: Nll, net: nn.Module, gradients: GaussianGradients, index: int) -> Tensor:
        """The noise of a new draw after the ascent of adversarial sampling."""
        attack = self.attack
        assert attack is not None
        by_weights = weight_gradients(
            net,
            nll,
            self.layout,
            self._aliases,
            partial(self.optimizer_step.check, at=self.steps),
            frozen=not attack.attack_statistics,
            process_group=self.process_group,
        )
        group = self.process_group
        if group is not None:  # a stream beside those of the plain draws
            group.reseed(self, group.draw_number(index, self.step_draws), 1)
        return attack.worst_noise(self._normal(), *gradients.moments(), by_weights, self.layout)

    def _locate(self, name: str, gradient: Tensor) -> str:
        if name != "rho":
            return plain_name(name)
        first = int((~torch.isfinite(gradient)).nonzero()[0])
        name = self.layout.name_at(first) if self.spread.per_weight else self.layout.names[first]
        return f"the std of {name}"

    # -- saving ----------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Constructor arguments; a prior fitted to the weights is none that could be given."""
        return {**super().config(), **({"prior": None} if self.kl_name == "ard" else {})}

    def describe(self) -> Description:
        """Prior, KL and σ."""
        rho = WeightState(
            self.rho,
            self.layout if self.spread.per_weight else None,
            lambda _, mean, before, after: self.spread.rho_for(mean, after.sqrt()),
        )
        return Description(
            prior=self.prior,
            layout=self.layout,
            kl=self.kl,
            kl_weight=self.kl_weight,
            temperature=self.temperature,
            noise=self.noise_name,
            spread_count=self.rho.numel(),
            state={"rho": rho},
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Also which layers were found to need weight draws: finding them again would use up random numbers."""
        return {**super().get_extra_state(), "by_weight": sorted(self._by_weight)}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        super().set_extra_state(state)
        self._by_weight = set(state["by_weight"])
