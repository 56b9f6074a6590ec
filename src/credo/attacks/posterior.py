"""A posterior as a function that attacks can take, for each thing that an attacker may know about it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from credo.attacks.common import Logits, OnProgress, answers, attackable, check_inputs, margins
from credo.core.errors import unknown
from credo.core.likelihood import ClassLikelihood
from credo.core.posterior import Posterior
from credo.predict.run import evaluating

THREATS = {
    "fresh": "knows the posterior; every look is at fresh draws, whose gradients are averaged (Athalye et al. 2018)",
    "mixture": "the same, but differentiates the averaged probabilities, which is what `predict` answers with",
    "fixed": "knows the very networks: drawn once, always the same",
    "one": "knows one network, drawn once, and hopes that the others fail with it",
}


class PosteriorLogits:
    """log p(class) of draws of a posterior: [draws, batch, classes], or [batch, classes] where they are averaged.

    Eval mode and random numbers are its own: the posterior is afterwards what it was. Two that were made alike answer
    alike, the first time as the tenth.
    """

    def __init__(self, posterior: Posterior, threat: str, draws: int, seed: int) -> None:
        if threat not in THREATS:
            raise ValueError(unknown("threat", threat, THREATS))
        if not isinstance(posterior.likelihood, ClassLikelihood):
            raise TypeError("Attacks change labels: the posterior needs a class likelihood.")
        if draws < 1:
            raise ValueError(f"draws={draws}: at least one is needed.")
        self.posterior, self.threat, self.likelihood = posterior, threat, posterior.likelihood
        self.draws = 1 if threat == "one" else posterior.whole_draws(draws)
        self.seed, self.calls = seed, 0
        self.kept: list[dict[str, Tensor]] | None = self._fixed() if threat in ("fixed", "one") else None

    @property
    def is_random(self) -> bool:
        """Whether two looks differ."""
        return self.kept is None and self.posterior.is_random

    def __call__(self, x: Tensor) -> Tensor:
        """Gradients reach the inputs through all draws at once."""
        self.calls += 1
        with evaluating(self.posterior, _seed(self.seed, self.calls)) as frozen:
            outputs = []
            for draw in self.kept if self.kept is not None else self._fresh(frozen):
                with frozen.sampled(draw) as net:
                    outputs.append(self.likelihood.log_probs(net(x.clone())))
        together = torch.stack(outputs)
        return together if self.threat == "fresh" else together.logsumexp(0) - math.log(len(together))

    def _fresh(self, frozen: Posterior) -> Iterable[dict[str, Tensor]]:
        with torch.no_grad():
            # Before the passes: activation noise uses the same generator.
            return list(frozen.draws(self.draws))

    def _fixed(self) -> list[dict[str, Tensor]]:
        with torch.no_grad(), self.posterior.snapshot(seed=_seed(self.seed, 0)) as frozen:
            # `draw` of a mixture chooses the member at random, `draws` goes through them in turn.
            kept = [frozen.draw()] if self.threat == "one" else list(frozen.draws(self.draws))
        if self.posterior.is_random and not kept[0]:
            raise ValueError(
                f"{type(self.posterior).__name__} has no network to fix: its noise is new in every pass. "
                "Attack it as 'fresh' or 'mixture'."
            )
        return kept


def posterior_logits(posterior: Posterior, threat: str = "fresh", *, draws: int = 10, seed: int = 0) -> PosteriorLogits:
    """The posterior as a function to attack, under one of `THREATS`.

    `"fresh"` is the attacker to report: it knows all there is to know but the random numbers. `draws` are networks for
    each look; a mixture takes as many from every member (rounded up), a point estimate is one network.
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
    """Share of `evaluations` in which each input has the wrong label (or its target's), [n].

    For functions that answer at random: that an attack succeeded once says little, and picking the times when it did
    makes a random network look worse than it is.
    """
    check_inputs(inputs, y, (-math.inf, math.inf), targets)
    if evaluations < 1:
        raise ValueError(f"evaluations={evaluations}: at least one is needed.")
    shares = []
    with attackable(logits):
        for rows in torch.arange(len(inputs), device=inputs.device).split(batch_size):
            goal = (y[rows], None if targets is None else targets[rows])
            hits = [margins(answers(logits, inputs[rows]), *goal) > 0 for _ in range(evaluations)]
            shares.append(torch.stack(hits).double().mean(0))
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(inputs))
    return torch.cat(shares)


def _seed(seed: int, call: int) -> int:
    """Hashed: generators with neighbouring seeds give related streams."""
    return int.from_bytes(hashlib.sha256(f"{seed} {call}".encode()).digest()[:8], "big") >> 1
