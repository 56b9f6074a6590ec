"""The gradients of Bayes by Backprop: passes through the network at drawn weights, and the chain rule by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.distributed.batch_shard import WHOLE
from credo.core.kernels import flat
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.flat_layout import Layout
from credo.core.network.layer_hooks import LayerUseError
from credo.core.network.substitute import parameters_at, substituted
from credo.core.optimizer_step import Descent, check_dense, scalar_loss
from credo.core.posterior import GaussianPosterior, Nll
from credo.core.prior import Gaussian, Prior
from credo.methods.adversarial_sampling import AdversarialSampling, weight_slopes
from credo.methods.bbb.activation_noise import noisy
from credo.methods.bbb.gradient_buffers import FusedSlopes, Slopes
from credo.methods.bbb.kl import closed_kl, monte_carlo_kl, relative_ard_kl
from credo.methods.bbb.std_parameterization import FreeSpread, RelativeSpread, Spread


class DrawnGradients(GaussianPosterior):
    """What `BBB` differentiates: the batch's loss at draws of the noise, and the KL."""

    layout: Layout
    prior: Prior
    rho: nn.Parameter
    spread: Spread
    descent: Descent
    attack: AdversarialSampling | None
    kl_name: str
    noise_name: str
    closed_form: bool
    step_draws: int
    _by_weight: set[str]

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
        slopes = weight_slopes(
            self._net, nll, self.layout, self._aliases, check, frozen=frozen, process_group=self.process_group
        )
        self._reseed(self._draw_number(index, self.step_draws), 1)  # a stream beside those of the plain draws
        eps = attack.worst_noise(self._normal(), mean, std, slopes, self.layout)
        before, share = len(self._shares()), attack.weight / self.step_draws
        value, gradients = self._pass(nll, torch.addcmul(mean, std, eps), None, before + index, share)
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

        # Only the first draw counts as data for running statistics, unless all passes shall.
        every = self.attack is not None and self.attack.weight > 0 and self.attack.attack_statistics
        with frozen_statistics(self._net) if index and not every else nullcontext():
            if self.noise_name == "weights":
                # Backward with the draw still in place: checkpointed parts of a network run again there.
                with self._means_unread(weights), substituted(self._net, weights, self._aliases) as net:
                    result = backward(nll(net))
            else:
                assert std is not None
                result = backward(self._tried_noisy_nll(nll, weights, std))
        gradients = {name: tensor.grad for name, tensor in weights.items()}
        if self.noise_name == "weights":
            self.guard.check_used(any(gradient is not None for gradient in gradients.values()))
        check_dense(gradients)
        return result, gradients

    def _tried_noisy_nll(self, nll: Nll, weights: dict[str, Tensor], std: Tensor) -> Tensor:
        statistics: AbstractContextManager[None] = nullcontext()
        while True:
            try:
                with statistics:
                    return self._noisy_nll(nll, weights, std)
            except LayerUseError as error:
                self.guard.check_used(error.some_fired)
                # Noise of its own per use would be wrong for these: from now on they take weight draws.
                self._by_weight.update(error.paths)
                # The pass just thrown away has counted as data for running statistics already.
                statistics = frozen_statistics(self._net)

    def _noisy_nll(self, nll: Nll, weights: dict[str, Tensor], std: Tensor) -> Tensor:
        places: dict[str, Any] = {"aliases": self._aliases, "by_weight": self._by_weight, "generator": self.generator}
        places["rows"] = WHOLE if self.process_group is None else self.process_group.rows
        with noisy(self._net, self.noise_name, weights, self.layout.split(std), **places) as net:
            return nll(net)

    def _closed_kl(self, mean: Tensor, std: Tensor) -> Tensor:
        return closed_kl(self.prior, mean, std)

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
