"""SGHMC: stochastic-gradient Hamiltonian Monte Carlo (Chen et al. 2014), cyclical if wanted (Zhang et al. 2020).

The rule is in `sampler.py`; the velocity v is kept from step to step, with friction α.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.optimizers import Rates
from credo.core.prior import Prior, Value
from credo.core.support.validate import is_number
from credo.methods.sgmcmc.sampler import StochasticGradientSampler


class SGHMC(StochasticGradientSampler):
    """Weights that a noisy momentum method visits; the posterior is the samples it keeps, and its draws are they.

    The target is p(w)·p(data | w)^(1/T). Data augmentation changes it: augmented images are no independent examples.
    BatchNorm does too, as the loss of an example depends on its batch; a sample keeps the running statistics that it
    was visited with. In a loop of your own call `plan_training_` first; without it there are no cycles, the rate is
    constant and the burn-in lasts 200 steps unless it is given in steps. `fit`'s own schedule has no effect unless
    `schedule=None`.

    Args:
        model: The network.
        data_size: Number of training examples, N.
        samples: Largest number of samples to keep, each as large as the trainable parameters. If more come, every
            second is dropped and the interval doubles, so that they stay evenly spaced.
        samples_dir: A folder that each sample is written to when it is kept, as a safetensors file, and read from when
            it is drawn: memory then holds one or two of them. Chains may share it. None: all are in memory.
        every: Steps from one sample to the next; None: planned by `fit` to give `samples` of them, otherwise 1.
        burn_in: Steps before samples are kept, or the fraction of the training that they are; with cycles, of each of
            them. None: 0.8 of each cycle, or 0.5 of a training without cycles. The preconditioner adapts in it alone.
        schedule: `"cyclical"`, ½(1 + cos) in each cycle, for classes with noise only after its burn-in; `"constant"`;
            `"decay"`, (1 + k/b)^−0.55 to a tenth; None: that of `fit` or `lr_scale`.
        cycles: Number of cycles; None: planned by `fit`, up to 4 of at least 10 epochs. A training too short for two
            has a constant rate.
        temperature: T: the likelihood counts 1/T times; 1 is the Bayes posterior, less is colder. None: planned by
            `fit` as for the other methods, but 1 where the noise of the targets is learned; without a plan 1.
        friction: α, which the velocity loses in each step; momentum SGD with 0.9 has 0.1.
        precondition: Divide the rate of each parameter tensor by the root of its mean squared gradient, so that rates
            mean what Adam's mean. It is measured in the burn-in and does not change while samples are taken. Without
            it rates are SGD's.
        prior: An object, its description, or a Gaussian's standard deviation; None: standard normal.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        random: Which parameters are sampled, as in `random_names`. The rest follow the same rule without noise.
        lr: The rate ε, or rates by name. With a preconditioner lr/friction is what Adam's rate is.
        likelihood: What the outputs mean: an object, its description or name; None: categorical. A learned noise is
            a point estimate.
        seed: Start of the posterior's own random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-5, 3e-3), "temperature": (0.01, 1.0)}

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        samples: int = 12,
        samples_dir: Path | str | None = None,
        every: int | None = None,
        burn_in: float | None = None,
        schedule: str | None = "cyclical",
        cycles: int | None = None,
        temperature: float | None = None,
        friction: float = 0.1,
        precondition: bool = True,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        random: Random = "all",
        lr: Rates = 5e-4,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        if not (is_number(friction) and 0 < friction <= 1):
            raise ValueError(f"friction={friction!r:.80} must be above 0 and at most 1, which is SGLD.")
        self._set_up(
            samples=samples,
            samples_dir=samples_dir,
            every=every,
            burn_in=burn_in,
            schedule=schedule,
            cycles=cycles,
            temperature=temperature,
            friction=float(friction),
            precondition=precondition,
            prior=prior,
            prior_precision=prior_precision,
            random=random,
            lr=lr,
        )
