"""A posterior as one module without randomness: the networks of fixed draws, and what is averaged over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import ClassLikelihood, DistributionLikelihood, GaussianNoise, Likelihood, MultiLabel
from credo.core.network.inputs import output_tensor

CLASS_OUTPUTS = ("probs", "total", "aleatoric", "epistemic")
VALUE_OUTPUTS = ("mean", "total", "aleatoric", "epistemic")


class FixedDraws(nn.Module):
    """Predicts with fixed networks: their average, and its uncertainty, as `credo.predict` defines them.

    Weights that are the same in every draw are stored once.

    Args:
        model: The network, in eval mode; inputs are given as to it.
        draws: Weights of each network, by name; `{}` is the network itself.
        likelihoods: Those of the draws, in turn.
        calibration: Temperature or factor on the noise.
        keys: Names of the inputs of a network that is called by keyword.
    """

    def __init__(
        self,
        model: nn.Module,
        draws: Sequence[Mapping[str, Tensor]],
        likelihoods: Sequence[Likelihood],
        calibration: Calibration,
        keys: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.keys = tuple(keys)
        self.model, self.likelihoods, self.calibration = model, nn.ModuleList(likelihoods), calibration
        self.names = [[*draw] for draw in draws]
        self.draws = len(draws)
        for number, draw in enumerate(draws):
            for index, tensor in enumerate(draw.values()):
                self.register_buffer(f"draw_{number}_{index}", tensor.detach().clone())

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what `forward` returns."""
        return CLASS_OUTPUTS if isinstance(self.likelihoods[0], ClassLikelihood | MultiLabel) else VALUE_OUTPUTS

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The prediction of one batch, four tensors."""
        found = [self._run(number, names, inputs) for number, names in enumerate(self.names)]
        first = self.likelihoods[0]
        if isinstance(first, ClassLikelihood):
            return _class_summary(torch.stack([first.log_probs(one) for one in found]), self.calibration.temperature)
        if isinstance(first, MultiLabel):
            return _label_summary(torch.stack(found) / self.calibration.temperature)
        pairs = [self._moments(number, one) for number, one in enumerate(found)]
        return _value_summary(torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs]))

    def _run(self, number: int, names: Sequence[str], inputs: tuple[Tensor, ...]) -> Tensor:
        weights = {name: self.get_buffer(f"draw_{number}_{index}") for index, name in enumerate(names)}
        args, named = arguments(inputs, self.keys)
        outputs: Any = functional_call(self.model, weights, args, named) if weights else self.model(*args, **named)
        return output_tensor(outputs)

    def _moments(self, number: int, outputs: Tensor) -> tuple[Tensor, Tensor]:
        likelihood = self.likelihoods[number % len(self.likelihoods)]
        if isinstance(likelihood, DistributionLikelihood):
            mean, variance = likelihood.mean_and_variance(outputs)
            return mean, variance.sqrt()
        assert isinstance(likelihood, GaussianNoise)
        mean, std = likelihood.moments(outputs)
        return mean, std * self.calibration.std_factor


def arguments(inputs: tuple[Tensor, ...], keys: Sequence[str]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments of a network.

    Args:
        inputs: Its inputs.
        keys: Their names, if it is called by keyword.
    """
    return ((), dict(zip(keys, inputs, strict=True))) if keys else (inputs, {})


def _class_summary(log_probs: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Averaged probabilities, their entropy, the average entropy, and the difference, of [draws, batch, classes]."""
    log_probs = (log_probs / temperature).log_softmax(-1)
    each = log_probs.exp()
    probs = each.mean(0)
    total = -(probs * probs.clamp_min(1e-30).log()).sum(-1)
    aleatoric = -(each * log_probs.clamp_min(-1e4)).sum(-1).mean(0)
    return probs, total, aleatoric, (total - aleatoric).clamp_min(0.0)


def _label_summary(logits: Tensor) -> tuple[Tensor, ...]:
    """As `_class_summary`, of each label by itself, of [draws, batch, labels]."""
    each = logits.sigmoid()
    probs = each.mean(0)
    total = -(probs * probs.clamp_min(1e-30).log() + (1 - probs) * (1 - probs).clamp_min(1e-30).log())
    yes, no = functional.logsigmoid(logits).clamp_min(-1e4), functional.logsigmoid(-logits).clamp_min(-1e4)
    aleatoric = -(each * yes + (1 - each) * no).mean(0)
    return probs, total, aleatoric, (total - aleatoric).clamp_min(0.0)


def _value_summary(means: Tensor, stds: Tensor) -> tuple[Tensor, ...]:
    """Mean, and standard deviations: total, of the noise, and of the means, of [draws, batch, outputs]."""
    mean, noise = means.mean(0), stds.square().mean(0)
    spread = (means - mean).square().mean(0)
    return mean, (noise + spread).sqrt(), noise.sqrt(), spread.sqrt()
