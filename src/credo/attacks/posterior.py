"""A posterior as an attackable function, under different threat models."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from credo.attacks.common import Logits, OnProgress, answers, attackable, check_inputs, margins
from credo.core.errors import unknown
from credo.core.likelihood import ClassLikelihood
from credo.core.network.substitute import Draw
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.predict.linear import LinearNetworks
from credo.predict.moments import tempered

THREATS = {
    "fresh": "knows the posterior; averages the gradients of fresh draws at every step (Athalye et al. 2018)",
    "mixture": "the same, but differentiates the averaged probabilities, which `predict` returns",
    "fixed": "knows the drawn networks: the same ones at every step",
    "one": "knows a single drawn network; the attack must transfer to the others",
}


class PosteriorLogits:
    """Log probabilities of draws of a posterior: [draws, batch, classes], or [batch, classes] if they are averaged.

    Draws are networks, or functions where the method linearises its network (`Laplace`), as `predict` has them.

    Evaluated in eval mode with its own random generator; the posterior is left unchanged. Objects with the same
    arguments give the same results.

    Args:
        posterior: Posterior of a classifier.
        threat: One of `THREATS`.
        draws: Networks per evaluation; 1 for the threat `"one"`.
        seed: Seed of the draws.
    """

    def __init__(self, posterior: Posterior, threat: str, draws: int, seed: int) -> None:
        if threat not in THREATS:
            raise ValueError(unknown("threat", threat, THREATS))
        if not isinstance(posterior.likelihood, ClassLikelihood):
            raise TypeError("Attacks change labels: the posterior needs a classification likelihood.")
        if draws < 1:
            raise ValueError(f"draws={draws} must be at least 1.")
        self.posterior, self.threat, self.likelihood = posterior, threat, posterior.likelihood
        self.draws = 1 if threat == "one" else posterior.whole_draws(draws)
        self.is_linear = posterior.default_predictive == "linear" and posterior.is_random
        self.seed, self.calls = seed, 0
        self.fixed_draws: list[Draw] | None = self._fixed() if threat in ("fixed", "one") else None

    @property
    def is_random(self) -> bool:
        """Whether two evaluations of the same input differ."""
        return self.fixed_draws is None and self.posterior.is_random

    def __call__(self, x: Tensor) -> Tensor:
        """Log probabilities at `x`, differentiable with respect to it through all draws."""
        self.calls += 1
        with evaluating(self.posterior, _seed(self.seed, self.calls)) as frozen:
            temperature = 1.0 if frozen.calibration is None else frozen.calibration.temperature
            draws = self._draws(frozen) if self.fixed_draws is None else self.fixed_draws
            outputs = LinearNetworks(frozen).outputs(draws, x) if self.is_linear else _outputs(frozen, draws, x)
            together = torch.stack([tempered(self.likelihood.log_probs(each), temperature) for each in outputs])
        return together if self.threat == "fresh" else together.logsumexp(0) - math.log(len(together))

    def _draws(self, frozen: Posterior) -> list[Draw]:
        with torch.no_grad():
            # Before the forward passes: activation noise uses the same generator.
            return list((LinearNetworks(frozen) if self.is_linear else frozen).iter_draws(self.draws))

    def _fixed(self) -> list[Draw]:
        with torch.no_grad(), evaluating(self.posterior, _seed(self.seed, 0)) as frozen:
            # `draw` of a mixture chooses a random member, `iter_draws` cycles through them.
            is_drawn_once = self.threat == "one" and not self.is_linear
            draws: list[Draw] = [frozen.draw()] if is_drawn_once else self._draws(frozen)
        if self.posterior.is_random and not draws[0]:
            raise ValueError(
                f"{type(self.posterior).__name__} has no fixed networks: its noise is new in every pass. "
                "Attack it as 'fresh' or 'mixture'."
            )
        return draws


def _outputs(frozen: Posterior, draws: Iterable[Draw], x: Tensor) -> list[Tensor]:
    outputs = []
    for draw in draws:
        with frozen.sampled(draw) as net:
            outputs.append(net(x.clone()))
    return outputs


def posterior_logits(posterior: Posterior, threat: str = "fresh", *, draws: int = 10, seed: int = 0) -> PosteriorLogits:
    """Turn a posterior into a function to attack.

    Args:
        posterior: Posterior of a classifier.
        threat: What the attacker knows, one of `THREATS`. Report `"fresh"`: it knows everything but the random numbers.
        draws: Networks per evaluation; a mixture takes equally many from every member (rounded up), a point estimate
            is one network.
        seed: Seed of the draws.
    """
    return PosteriorLogits(posterior, threat, draws, seed)


@torch.no_grad()
def success_rate(
    logits: Logits,
    inputs: Tensor,
    y: Tensor,
    *,
    targets: Tensor | None = None,
    evaluations: int = 10,
    batch_size: int = 1000,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """Fraction of evaluations in which each input has the wrong label (or its target), [n].

    For stochastic functions: a single success means little, and selecting the successful evaluations would make a
    stochastic network look worse than it is.

    Args:
        logits: Attacked function of inputs: a network, or `posterior_logits`.
        inputs: Perturbed inputs, [n, ...].
        y: True labels, [n].
        targets: Class that each input should reach, [n]; None for any other class.
        evaluations: Evaluations of each input.
        batch_size: Inputs evaluated at a time.
        on_progress: Called with (inputs done, inputs in total) after each batch.
    """
    check_inputs(inputs, y, (-math.inf, math.inf), targets)
    if evaluations < 1:
        raise ValueError(f"evaluations={evaluations} must be at least 1.")
    rates = []
    with attackable(logits):
        for rows in torch.arange(len(inputs), device=inputs.device).split(batch_size):
            goal = (y[rows], None if targets is None else targets[rows])
            hits = [margins(answers(logits, inputs[rows]), *goal) > 0 for _ in range(evaluations)]
            rates.append(torch.stack(hits).double().mean(0))
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(inputs))
    return torch.cat(rates)


def _seed(seed: int, call: int) -> int:
    """Hash, since generators with neighbouring seeds give correlated streams."""
    return int.from_bytes(hashlib.sha256(f"{seed} {call}".encode()).digest()[:8], "big") >> 1
