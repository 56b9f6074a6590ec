"""Bayes by Backprop: mean-field variational inference by gradient descent.

q(w) = N(μ, σ²) for each random weight, σ = softplus(ρ) or √α·|μ|. Each step minimises the negative ELBO per example,

    mean NLL(w) + (temperature · weight(step) / data_size) · KL(q ‖ p),        w = μ + σ·ε, ε ~ N(0, 1),

(Graves 2011; Blundell et al. 2015), where the noise enters as one weight draw for the batch, by local
reparameterisation (Kingma et al. 2015) or by Flipout (Wen et al. 2018). The network's own parameters are μ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.divergence import compare_draw
from credo.core.example_counts import Counted, weighed
from credo.core.kernels import flat
from credo.core.kl_schedule import KLWeight, make_kl_weight
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import statistics_kept_on_error
from credo.core.network.flat_layout import Layout
from credo.core.network.inplace_inputs import same_inputs
from credo.core.network.selection import Random, all_names, one_device, random_names
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import Descent, OptimizerChoice, plain_name
from credo.core.posterior import Nll, Terms
from credo.core.prior import Prior
from credo.core.support.validate import checked_count
from credo.methods.adversarial_sampling import NAME as ADVERSARIAL
from credo.methods.adversarial_sampling import AdversarialSampling, is_attack, make_attack, unknown_noise
from credo.methods.bbb.activation_noise import NOISES
from credo.methods.bbb.elbo_gradients import DrawnGradients
from credo.methods.bbb.gradient_buffers import FusedSlopes
from credo.methods.bbb.init import MeanInit, initialise_mean_
from credo.methods.bbb.kl import KL_NAMES as KL_NAMES
from credo.methods.bbb.kl import prior_for, uses_closed_form
from credo.methods.bbb.std_parameterization import make_spread
from credo.methods.map import trainable

NOISE_NAMES = ("weights", *NOISES, ADVERSARIAL)
Noise = str | AdversarialSampling | Mapping[str, Any]


class BBB(DrawnGradients):
    """Mean-field Gaussian posterior trained by the reparameterisation trick.

    `noise`: how training sees the weights: `"weights"` (one draw for the batch), `"lrt"` or `"flipout"` (noise of its
    own for each example, less gradient variance; layers not covered, tied or reused take weight draws), or
    `AdversarialSampling(...)`: weight draws and the worst ones near them. Prediction always draws weights. `kl`: closed
    form where the prior has one, the Monte-Carlo estimate log q(w) − log p(w), or `"ard"`: ½Σ log(1 + μ²/σ²), the
    closed form for a prior N(0, s²) whose s is the best one for each weight. `spread`: σ is `"free"`, or √α·|μ| with a
    learned α of each weight (`"relative"`) or tensor (`"relative-layer"`), as Shridhar et al. (2019) have it.
    Give one of `std_init` (σ itself), `relative_std` (σ = that share of |μ|, for pretrained networks) or `rho_init`
    (a number, or mean and std of a normal; log α for a relative spread). `mean_init="keep"` leaves the network's
    weights, also pretrained ones.
    """

    averages_over_processes = True

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        prior: Prior | Mapping[str, Any] | float | None = None,
        noise: Noise = "weights",
        draws: int = 1,
        temperature: float = 1.0,
        kl: str = "auto",
        spread: str = "free",
        kl_weight: str | KLWeight | None = "constant",
        batches: int | None = None,
        warmup_steps: int | None = None,
        random: Random = "all",
        mean_init: MeanInit = "keep",
        std_init: float | None = None,
        relative_std: float | None = None,
        rho_init: float | tuple[float, float] | None = None,
        optimizer: OptimizerChoice | None = "adam",
        lr: float = 1e-3,
        optimizer_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        _check_choices(noise, draws, temperature)
        self.attack = make_attack(noise) if is_attack(noise) else None
        self._config = {
            "noise": noise if self.attack is None else self.attack.config(),
            "draws": int(draws),
            "temperature": temperature,
            "kl": kl,
            "spread": spread,
            "kl_weight": kl_weight if isinstance(kl_weight, str) else None,
            "batches": batches,
            "warmup_steps": warmup_steps,
            "optimizer": optimizer if isinstance(optimizer, str) else None,
            "lr": lr,
            "optimizer_options": dict(optimizer_options or {}),
            "clip_norm": clip_norm,
        }
        self.noise_name = "weights" if self.attack is not None else str(noise)
        self.step_draws, self.temperature = int(draws), temperature
        self.kl_weight = make_kl_weight(kl_weight, batches=batches, warmup_steps=warmup_steps)
        parameters = parameters_at(model, random_names(model, random))
        self.layout = Layout(parameters, known=all_names(model))
        device = one_device(parameters)
        self.prior = prior_for(kl, prior).bind(self.layout, data_size=self.data_size, device=device)
        self.kl_name, self.spread = kl, make_spread(spread)
        like = torch.empty(self.layout.size, device=self.device, dtype=self.layout.dtype)
        self.closed_form = uses_closed_form(self.prior, kl, like)
        initialise_mean_(parameters, mean_init, self.prior, self.layout, self.generator)
        mean = self.layout.flatten(parameters).detach()
        self.rho = nn.Parameter(self.spread.first(mean, std_init, relative_std, rho_init, self.generator, self.layout))
        self._by_weight: set[str] = set()
        self.descent = Descent(
            trainable(self), optimizer, lr, optimizer_options, clip_norm, locate=self._locate, undecayed=("rho",)
        )

    @classmethod
    def from_pretrained(cls, model: nn.Module, *, relative_std: float | None = None, **options: Any) -> BBB:
        """Start from trained weights: μ keeps them, σ is `relative_std`·|μ| (Krishnan et al. 2020).

        A tenth of them, unless `relative_std`, `std_init` or `rho_init` says otherwise. Running statistics stay.
        """
        if relative_std is None and options.get("std_init") is None and options.get("rho_init") is None:
            relative_std = 0.1
        return cls(model, relative_std=relative_std, **options)

    # -- the distribution ------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """μ + σ·ε for every random parameter."""
        means = parameters_at(self.model, self.layout.names)
        if self._is_free and not torch.is_grad_enabled() and flat.fused([*means.values(), self.rho]):
            listed = flat.TensorList(self.layout.pieces(means))
            return self.layout.split(flat.softplus_draw(listed, self.rho, flat.new_key(self.generator)))
        return self.layout.split(torch.addcmul(*self._moments(), self._normal()))

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.layout.names).items()}

    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations, softplus(ρ) or √α·|μ|."""
        with torch.no_grad():
            return self.layout.split(self._moments()[1])

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune for good: ρ and the prior lose their entries, gradients and optimiser leave pruned means at zero."""
        kept = self._keep(masks)
        self.layout, chosen = self.layout.narrowed(kept)
        self.prior = self.prior.at(chosen)
        self.descent.keep_({f"model.{name}": mask for name, mask in kept.items()})
        if self.spread.per_weight:
            self.descent.narrow_("rho", chosen)

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats, summed over all random weights; one Monte-Carlo draw where no closed form is used."""
        if self._kl_of_rho:
            return self._rho_kl(self.rho)
        mean, std = self._moments()
        return self._closed_kl(mean, std) if self.closed_form else self._monte_carlo_kl(mean, std, self._normal())

    # -- training --------------------------------------------------------------------------------------------

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """One step of the optimiser on the negative ELBO per example, averaged over the draws.

        The chain rule from weights to (μ, ρ) is applied by hand, after each pass has freed its activations, which
        saves autograd's own graph and temporaries over all weights.
        """
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step whose gradients are there and checked; what it yields makes the update."""
        with statistics_kept_on_error(self.model), self.descent.cleared_on_error(self.process_group):
            self.descent.clear()
            nll = weighed(nll, Counted(examples, weights), self.process_group)
            nll = same_inputs(nll) if self._has_passes else nll
            weight = self.temperature * self.kl_weight(self.steps) / self.data_size
            if self.attack is not None:
                weight *= self.attack.kl_share()
            means = parameters_at(self.model, self.layout.names)
            plain = self.noise_name == "weights" and self.closed_form
            fused = plain and self._is_free and self.layout.is_whole and FusedSlopes.covers(means, self.rho, self.prior)
            data_term, kl, squares = (self._fused_slopes if fused else self._slopes)(nll, means, weight)
            compare_draw(self, data_term, nll)
            squared = () if squares is None else (*means.values(), self.rho)
            losses = (data_term, kl)
            data_term, kl = self.descent.ready(at=self.steps, squares=squares or 0.0, squared=squared, losses=losses)
            terms = Terms(loss=data_term + weight * kl, nll=data_term, penalty=weight * kl, kl=kl)
            yield partial(self._update, terms)

    def _update(self, terms: Terms) -> Terms:
        self.descent.move(scale=self.lr_scale)
        return self._stepped(terms)

    def _locate(self, name: str, gradient: Tensor) -> str:
        if name != "rho":
            return plain_name(name)
        first = int((~torch.isfinite(gradient)).nonzero()[0])
        name = self.layout.name_at(first) if self.spread.per_weight else self.layout.names[first]
        return f"the std of {name}"

    # -- saving ----------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Constructor arguments; what initialisation gave is in the tensors."""
        return {
            **self._config,
            "random": list(self.layout.names),
            "prior": None if self.kl_name == "ard" else self.prior.config(),
            "likelihood": self.likelihood.config(),
            "seed": self.seed,
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Also which layers were found to need weight draws: finding them anew would use up random numbers."""
        return {**super().get_extra_state(), "by_weight": sorted(self._by_weight)}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        super().set_extra_state(state)
        self._by_weight = set(state["by_weight"])

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.descent.optimizer


def _check_choices(noise: Noise, draws: int, temperature: float) -> None:
    if not is_attack(noise) and noise not in NOISE_NAMES:
        raise unknown_noise(noise, NOISE_NAMES)
    checked_count("draws", draws, what="draws a step")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be finite and not negative; 1 is the exact posterior.")
