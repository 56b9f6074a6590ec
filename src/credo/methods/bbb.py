"""Bayes by Backprop: mean-field variational inference by gradient descent.

q(w) = N(μ, σ²) for each random weight, σ = softplus(ρ) or √α·|μ|. Each step minimises the negative ELBO per example,

    mean NLL(w) + (temperature · weight(step) / data_size) · KL(q ‖ p),        w = μ + σ·ε, ε ~ N(0, 1),

(Graves 2011; Blundell et al. 2015), where the noise enters as one weight draw for the batch, by local
reparameterisation (Kingma et al. 2015) or by Flipout (Wen et al. 2018). The network's own parameters are μ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.batchnorm import frozen_statistics, statistics_kept_on_error
from credo.core.counts import checked_count
from credo.core.descent import Descent, OptimizerChoice, check_dense, plain_name, scalar_loss
from credo.core.errors import unknown
from credo.core.inputs import same_inputs
from credo.core.kernels import flat
from credo.core.kl_weights import KLWeight, make_kl_weight
from credo.core.likelihood import Likelihood
from credo.core.posterior import GaussianPosterior, Nll, Terms
from credo.core.prior import Gaussian, Prior, make_prior
from credo.core.rows import WHOLE
from credo.core.taps import LayerUseError
from credo.core.weights import Layout, Random, all_names, one_device, parameters_at, random_names, substituted
from credo.methods.activation_noise import NOISES, noisy
from credo.methods.adversarial import NAME as ADVERSARIAL
from credo.methods.adversarial import AdversarialSampling, is_attack, make_attack, weight_slopes
from credo.methods.initial import MeanInit, initialise_mean_
from credo.methods.point import trainable
from credo.methods.slopes import FusedSlopes, Slopes
from credo.methods.spread import FreeSpread, RelativeSpread, make_spread
from credo.methods.weight_kl import KL_NAMES as KL_NAMES
from credo.methods.weight_kl import closed_kl, monte_carlo_kl, relative_ard_kl, uses_closed_form

NOISE_NAMES = ("weights", *NOISES, ADVERSARIAL)
Noise = str | AdversarialSampling | Mapping[str, Any]


class BBB(GaussianPosterior):
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

    steps_in_team = True

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
        _check_choices(noise, kl, prior, draws, temperature)
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
        self.prior = make_prior(prior).bind(self.layout, data_size=self.data_size, device=device)
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

    def step(self, nll: Nll) -> Terms:
        """One step of the optimiser on the negative ELBO per example, averaged over the draws.

        The chain rule from weights to (μ, ρ) is applied by hand, after each pass has freed its activations, which
        saves autograd's own graph and temporaries over all weights.
        """
        with self.prepared(nll) as update:
            return update()

    @contextmanager
    def prepared(self, nll: Nll) -> Iterator[Callable[[], Terms]]:
        """A step whose gradients are there and checked; what it yields makes the update."""
        with statistics_kept_on_error(self.model), self.descent.cleared_on_error(self.team):
            self.descent.clear()
            nll = same_inputs(nll) if self._has_passes else nll
            weight = self.temperature * self.kl_weight(self.steps) / self.data_size
            if self.attack is not None:
                weight *= self.attack.kl_share()
            means = parameters_at(self.model, self.layout.names)
            plain = self.noise_name == "weights" and self.closed_form
            plain = plain and self._is_free and self.kl_name != "ard"
            fused = plain and self.layout.is_whole and FusedSlopes.covers(means, self.rho, self.prior)
            data_term, kl, squares = (self._fused_slopes if fused else self._slopes)(nll, means, weight)
            squared = () if squares is None else (*means.values(), self.rho)
            losses = (data_term, kl)
            data_term, kl = self.descent.ready(at=self.steps, squares=squares or 0.0, squared=squared, losses=losses)
            terms = Terms(loss=data_term + weight * kl, nll=data_term, penalty=weight * kl, kl=kl)
            yield partial(self._update, terms)

    def _update(self, terms: Terms) -> Terms:
        self.descent.move(scale=self.lr_scale)
        self.steps += 1
        return terms

    def _slopes(self, nll: Nll, means: dict[str, nn.Parameter], weight: float) -> tuple[float, float, None]:
        """Set all gradients; returns mean NLL and KL."""
        with torch.no_grad():
            slopes = Slopes(*self._moments())
        data_term = kl = 0.0
        for index, share in enumerate(self._shares()):
            self._begin_pass(index, self.step_draws)
            eps = self._normal()
            draw = torch.addcmul(slopes.at_mean, slopes.at_std, eps)
            std = slopes.at_std.detach().requires_grad_(self.noise_name != "weights")
            value, gradients = self._pass(nll, draw, std, index, share)
            data_term += share * value
            slopes.add_weights(self._whole(gradients), eps)
            if std.grad is not None:
                slopes.std.add_(std.grad)
            if not self.closed_form:
                kl += slopes.add(partial(self._monte_carlo_kl, eps=eps), weight / self.step_draws) / self.step_draws
        for index in self._attacks():
            value, gradients, eps = self._attacked_pass(nll, slopes.at_mean, slopes.at_std, index)
            data_term += value
            slopes.add_weights(self._whole(gradients), eps)
            if not (self.closed_form or self._shares()):
                own = partial(self._monte_carlo_kl, eps=self._normal())
                kl += slopes.add(own, weight / self.step_draws) / self.step_draws
        if self._kl_of_rho:
            kl = slopes.add_rho(self._rho_kl, self.rho, weight)
        elif self.closed_form:
            kl = slopes.add(self._closed_kl, weight)
        self.descent.check(data_term + weight * kl, at=self.steps)
        by_rho = self.spread.back_(slopes, self.rho.detach(), self.layout)
        self.rho.grad = by_rho if slopes.rho is None else by_rho.add_(slopes.rho)
        for name, piece in self.layout.split(slopes.mean).items():
            # The means of layers with activation noise have a share already.
            grad = means[name].grad
            means[name].grad = piece if grad is None else grad.add_(piece)
        return data_term, kl, None

    def _fused_slopes(
        self, nll: Nll, means: dict[str, nn.Parameter], weight: float
    ) -> tuple[float, float, float | None]:
        """The same in compiled passes, for weight draws under a Gaussian prior; also the squared norm, if known."""
        slopes = FusedSlopes(means, self.rho, cast(Gaussian, self.prior), self.generator)
        data_term = 0.0
        for index, share in enumerate(self._shares()):
            self._begin_pass(index, self.step_draws)
            value, gradients = self._pass(nll, slopes.draw(), None, index, share)
            data_term += share * value
            slopes.add_weights(gradients, weight)
        for index in self._attacks():
            with torch.no_grad():
                mean, std = self._moments()
            value, gradients, eps = self._attacked_pass(nll, mean, std, index)
            data_term += value
            slopes.add_noise(gradients, eps, weight)
        self.descent.check(data_term + weight * slopes.kl, at=self.steps)
        self.rho.grad = slopes.rho
        squares = slopes.squares
        for parameter, gradient in zip(means.values(), slopes.mean, strict=True):
            # What the loss took from the mean itself, past the draw, counts as in the other path.
            squares = squares if parameter.grad is None else None
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return data_term, slopes.kl, squares

    def _attacks(self) -> range:
        """The attacked passes of a step: as many as plain ones."""
        return range(self.step_draws if self.attack is not None and self.attack.weight > 0 else 0)

    @property
    def _has_passes(self) -> bool:
        """Whether a step may run the loss more than once."""
        return self.step_draws > 1 or self.attack is not None or self.noise_name != "weights"

    def _shares(self) -> list[float]:
        """Each plain draw's share of the loss."""
        share = 1.0 if self.attack is None else 1 - self.attack.weight
        return [share / self.step_draws] * self.step_draws if share > 0 else []

    def _attacked_pass(
        self, nll: Nll, mean: Tensor, std: Tensor, index: int
    ) -> tuple[float, dict[str, Tensor | None], Tensor]:
        """The NLL at the worst weights near a new draw, times its share; derivatives by these weights; their noise."""
        attack = self.attack
        assert attack is not None
        check = partial(self.descent.check, at=self.steps)
        frozen = not attack.attack_statistics
        slopes = weight_slopes(self.model, nll, self.layout, self._aliases, check, frozen=frozen, team=self.team)
        self._reseed(self._draw_number(index, self.step_draws), 1)  # a stream beside those of the plain draws
        eps = attack.worst_noise(self._normal(), mean, std, slopes, self.layout)
        before, share = len(self._shares()), attack.weight / self.step_draws
        number = before + index if frozen else 0
        value, gradients = self._pass(nll, torch.addcmul(mean, std, eps), None, number, share)
        return share * value, gradients, eps

    def _whole(self, gradients: dict[str, Tensor | None]) -> Tensor:
        """Derivatives as one vector, zero where there are none."""
        shapes = self.layout.shapes
        return self.layout.flatten(
            {n: self.rho.new_zeros(shapes[n]) if g is None else g for n, g in gradients.items()}
        ).detach()

    def _pass(
        self, nll: Nll, draw: Tensor, std: Tensor | None, index: int, share: float
    ) -> tuple[float, dict[str, Tensor | None]]:
        """The batch's NLL under one sample of the noise, and `share` of the derivatives by the weights drawn."""
        weights = {name: tensor.detach().requires_grad_() for name, tensor in self.layout.split(draw).items()}

        def backward(value: Tensor) -> float:
            value = scalar_loss(value)
            number = value.item()
            self.descent.check(number, at=self.steps)
            (value if share == 1 else value * share).backward()
            return number

        # Only the first draw counts as data for running statistics.
        with frozen_statistics(self.model) if index else nullcontext():
            if self.noise_name == "weights":
                # Backward with the draw still in place: checkpointed parts of a network run again there.
                with substituted(self.model, weights, self._aliases):
                    result = backward(nll(self.model))
            else:
                assert std is not None
                result = backward(self._tried_noisy_nll(nll, weights, std))
        gradients = {name: tensor.grad for name, tensor in weights.items()}
        check_dense(gradients)
        return result, gradients

    def _tried_noisy_nll(self, nll: Nll, weights: dict[str, Tensor], std: Tensor) -> Tensor:
        statistics: AbstractContextManager[None] = nullcontext()
        while True:
            try:
                with statistics:
                    return self._noisy_nll(nll, weights, std)
            except LayerUseError as error:
                # Noise of its own per use would be wrong for these: from now on they take weight draws.
                self._by_weight.update(error.paths)
                # The pass just thrown away has counted as data for running statistics already.
                statistics = frozen_statistics(self.model)

    def _noisy_nll(self, nll: Nll, weights: dict[str, Tensor], std: Tensor) -> Tensor:
        places: dict[str, Any] = {"aliases": self._aliases, "by_weight": self._by_weight, "generator": self.generator}
        places["rows"] = WHOLE if self.team is None else self.team.rows
        with noisy(self.model, self.noise_name, weights, self.layout.split(std), **places) as net:
            return nll(net)

    def _closed_kl(self, mean: Tensor, std: Tensor) -> Tensor:
        return closed_kl(self.prior, self.kl_name, mean, std)

    def _rho_kl(self, rho: Tensor) -> Tensor:
        assert isinstance(self.spread, RelativeSpread)
        return relative_ard_kl(self.spread.log_alpha(rho, self.layout))

    def _monte_carlo_kl(self, mean: Tensor, std: Tensor, eps: Tensor) -> Tensor:
        return monte_carlo_kl(self.prior, mean, std, eps)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations as flat vectors, in the graph."""
        mean = self.layout.flatten(parameters_at(self.model, self.layout.names))
        return mean, self.spread.std(mean, self.rho, self.layout)

    def _normal(self) -> Tensor:
        return flat.normal(self.layout.size, self.generator, device=self.rho.device, dtype=self.rho.dtype)

    @property
    def _kl_of_rho(self) -> bool:
        return self.kl_name == "ard" and isinstance(self.spread, RelativeSpread)

    @property
    def _is_free(self) -> bool:
        return isinstance(self.spread, FreeSpread)

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


def _check_choices(noise: Noise, kl: str, prior: Any, draws: int, temperature: float) -> None:
    if not is_attack(noise) and noise not in NOISE_NAMES:
        raise ValueError(unknown("noise", str(noise), NOISE_NAMES))
    if kl == "ard" and prior is not None:
        raise ValueError("kl='ard' fits a prior to each weight: leave prior out, or choose kl='auto'.")
    checked_count("draws", draws, what="draws a step")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be finite and not negative; 1 is the exact posterior.")
