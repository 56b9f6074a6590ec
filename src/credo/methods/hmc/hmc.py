"""Hamiltonian Monte Carlo over all training data: samples of the posterior itself, the reference for small networks.

    p(w | D) ∝ p(w)·p(D | w)^(1/T),

T the temperature, which divides the log-likelihood as in every other method here. Chains move along trajectories of
Hamiltonian dynamics (Duane et al. 1987; Neal 2011), all at once, with jittered lengths that warm-up chooses
(`adaptation.py`), and begin at an ensemble of short trainings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description, KeptChains
from credo.core.errors import CredoWarning, UnsupportedModelError
from credo.core.likelihood import GaussianNoise, Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import Forward, Inputs, Target, join_inputs, tensors_of
from credo.core.network.selection import Random, all_names, one_device, random_names
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import GradientPosterior, OptimizerStep, trainable
from credo.core.optimizers import Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Terms
from credo.core.prior import Prior, Value, make_prior, one_prior
from credo.core.support.loader_checks import read_quietly
from credo.core.support.memory import available_bytes
from credo.core.support.progress import make_progress
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count, is_number
from credo.core.thread_safety import changes_weights, checked_once
from credo.methods.hmc.chains import Chains, Plan, RunSummary, Saver, digest, resumed_chains, run, start_chains
from credo.methods.hmc.groups import RENAMED_SETTINGS, ChainSettings
from credo.methods.hmc.potential import Data, Potential
from credo.methods.hmc.starts import fresh_weights, trained, without_fresh_start
from credo.methods.training_pass import checked_pair, training_pass, warn_of_data_size

# A chain that accepts less than this part of its transitions is stuck.
_LEAST_ACCEPTANCE = 0.2
# More weights than this are possible, but chains hardly mix in any time that one has.
MOST_WEIGHTS = 100_000


class HMC(GradientPosterior):
    """Samples of the posterior, by chains of Hamiltonian Monte Carlo over all data; for up to 10⁵ weights.

    `HMC(model, data_size=N).fit(loader)` runs the chains and changes no weight of the network; draws are the samples
    that were kept. `credo.fit` trains the network before, as MAP does, and the first chain begins there. Without a run,
    and after any further step, there are no samples, and all draws are the network itself. The network runs in eval
    mode: dropout is off, and BatchNorm's running statistics are constants.

    A learned noise (scale, dispersion, cut points) is not sampled: it is that of the training, or without one that of
    the chains' starts.
    Look at `diagnostics` before you call the samples a reference.

    Args:
        model: The network.
        data_size: Number of training examples; if the loader has another number, the log-likelihood is scaled.
        chains: Number of chains; they share passes, so some more cost little. At least 2.
        warmup: Transitions of each chain that tune the sampler and are thrown away.
        samples: Samples that are kept of all chains together, rounded up to as many from each.
        settings: How chains begin and move: a `ChainSettings`, or a mapping of its fields.
        prior: The prior of the random weights: an object, its description, or a Gaussian's standard deviation; None:
            a standard Gaussian.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        temperature: T; 1 is the Bayes posterior.
        random: Which parameters are random, as in `random_names`; all others stay as they are.
        optimizer: That of `step`: an `Optimizer`, a mapping, a name of `OPTIMIZERS`, or a function from parameters to
            an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    averages_over_processes = False
    is_linearisable: ClassVar[bool] = False
    has_noise_scale: ClassVar[bool] = False
    needs_training: ClassVar[bool] = False
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2), "prior": (0.1, 10.0)}
    _not_in_config = ("prior_precision",)
    _renamed_arguments: ClassVar[Renamed] = RENAMED_SETTINGS
    samples: Tensor
    record: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        chains: int = 8,
        warmup: int = 500,
        samples: int = 400,
        settings: ChainSettings | Mapping[str, Any] = ChainSettings(),
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        temperature: float = 1.0,
        random: Random = "all",
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 1e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        _check(temperature, self.likelihood)
        chosen_settings = ChainSettings.of(settings)
        chains = checked_count("chains", chains, least=2, what="chains")
        kept = -(-checked_count("samples", samples, what="samples") // chains)
        self.plan = Plan(
            checked_count("warmup", warmup, what="transitions"),
            kept,
            int(chosen_settings.thin),
            float(chosen_settings.target_accept),
            int(chosen_settings.max_steps),
        )
        self.start_steps, self.float64 = int(chosen_settings.start_steps), bool(chosen_settings.float64)
        self.temperature = float(temperature)
        chosen = parameters_at(model, random_names(model, random))
        self.layout = Layout(chosen, least=torch.float32, known=all_names(model))
        self.arguments["random"] = list(self.layout.names)
        device = one_device(chosen)
        self.prior: Prior = make_prior(one_prior(prior, prior_precision)).bind(
            self.layout, data_size=self.data_size, device=device
        )
        _check_memory(chains, kept, self.layout, device)
        empty = torch.zeros(chains, kept, self.layout.size, dtype=self.layout.dtype, device=device)
        self.register_buffer("samples", empty)
        self.register_buffer("record", torch.tensor(RunSummary(), dtype=torch.double, device=device))
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr)

    # -- the distribution --------------------------------------------------------------------------------------

    @property
    def summary(self) -> RunSummary:
        """What the run of the chains was like: divergences, acceptance, step size; `samples` is 0 before one."""
        return RunSummary(*self.record.tolist())

    @property
    def is_random(self) -> bool:
        """Whether draws differ: not without samples."""
        return self.has_samples

    @property
    def has_samples(self) -> bool:
        """Whether chains have been run since the last step."""
        return bool(self.record[0] > 0)

    @property
    def uncertainty_needs(self) -> str:
        """Samples, unless chains were run since the last step."""
        return "" if self.has_samples else "samples: posterior.fit(loader) runs the chains"

    def draw(self) -> dict[str, Tensor]:
        """One of the kept samples; `{}`, the network itself, without any."""
        return next(self.iter_draws(1))

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """`count` kept samples, evenly from the chains, in random order; none twice before all were drawn."""
        if not self.has_samples:
            yield from ({} for _ in range(count))
            return
        chains, kept, _ = self.samples.shape
        device = self.samples.device
        within = torch.rand(chains, kept, generator=self.generator, device=device).argsort(1)
        across = torch.rand(kept, chains, generator=self.generator, device=device).argsort(1)
        for index in range(count):
            turn, place = divmod(index % (chains * kept), chains)
            chain = int(across[turn, place])
            yield self._sample_at(chain, int(within[chain, turn]))

    def _sample_at(self, chain: int, index: int) -> dict[str, Tensor]:
        return self.layout.split(self.samples[chain, index].clone())

    # -- training of the network itself --------------------------------------------------------------------------

    def _penalty(self) -> Tensor:
        return super()._penalty() * self.temperature

    def _update(self, terms: Terms) -> Terms:
        self.record.zero_()  # the samples were those of another noise, perhaps
        return super()._update(terms)

    # -- the chains ----------------------------------------------------------------------------------------------

    @changes_weights
    def fit(
        self,
        loader: Iterable[Any],
        *,
        checkpoint: Path | str | None = None,
        checkpoint_every: int = 50,
        progress: bool = True,
        forward: Forward | None = None,
        target: Target | None = None,
    ) -> Self:
        """Run the chains over all data, and keep their samples; returns itself.

        Args:
            loader: The training batches, (inputs, targets); one pass, and all of it is held in memory.
            checkpoint: A file that the state is written to, and from which a run that was stopped continues, bit for
                bit as if it had not been.
            checkpoint_every: Transitions from one write to the next.
            progress: Show a progress bar; only on an interactive terminal.
            forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in
                `credo.predict`.
            target: `target(batch)` returns the targets; None: by the form of the batch.
        """
        every = checked_count("checkpoint_every", checkpoint_every, what="transitions")
        file = None if checkpoint is None else Path(checkpoint)
        batches = training_pass(self, loader, progress=False, forward=forward, target=target)
        with batches as read, _shown(self.plan.total, progress=progress) as on_transition:
            self._sample(read, file, every, on_transition)
        self._warn()
        return self

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Run the chains, unless it has been done since the last step.

        Args:
            loader: The training batches.
        """
        if not self.has_samples:
            self._sample(loader, None, 1, lambda chains: None)
            self._warn()

    @checked_once
    def _sample(
        self, loader: Iterable[Any], file: Path | None, every: int, on_transition: Callable[[Chains], None]
    ) -> None:
        data = self._data(loader)
        with torch.no_grad(), self.snapshot(training=False) as frozen:
            net, likelihood = frozen.model, frozen.likelihood
            layout = Layout(parameters_at(net, self.layout.names), least=self._dtype)
            energy = Potential(net, layout, likelihood, frozen.prior, data, self.temperature)
            saver = None if file is None else Saver(file, every, self._key(net, data), likelihood)
            chains = self._started(net, energy, layout, saver)
            run(chains, energy, self.plan, on_transition=on_transition, save=saver)
            found = {name: tensor.clone() for name, tensor in likelihood.state_dict().items()}
        with self.guard.exclusive(self):
            self.likelihood.load_state_dict(found)
            self.samples.copy_(chains.samples)
            self.record.copy_(torch.tensor(chains.summary(self.plan), dtype=torch.double))

    def _started(self, net: nn.Module, energy: Potential, layout: Layout, saver: Saver | None) -> Chains:
        """Chains as a file has them, or at their start."""
        samples = torch.zeros_like(self.samples)
        state = None if saver is None else saver.read()
        if state is not None:
            chains = resumed_chains(state, self.plan, samples)
            energy.record_(chains.point.weights)
            return chains
        own = [parameter for parameter in energy.likelihood.parameters() if parameter.requires_grad]
        learned = [] if self.steps else own  # a training has learned them already
        if learned:
            energy.likelihood.start_(energy.data.y)
        weights = fresh_weights(net, layout, len(samples), self.seed)
        if not learned:
            energy.record_(weights)
        weights = trained(energy, weights, steps=self.start_steps, learned=learned)
        energy.record_(weights)
        scale = torch.as_tensor(self.prior.std, dtype=layout.dtype, device=self.device).expand(layout.size)
        scale = torch.where(scale.isfinite(), scale, 1.0)
        return start_chains(energy, weights, scale, self.plan, samples, self.seed)

    @property
    def _dtype(self) -> torch.dtype:
        """The precision that chains are run in."""
        return torch.float64 if self.float64 else self.layout.dtype

    def _data(self, loader: Iterable[Any]) -> Data:
        """All data of the loader, in the precision of the chains, on the device."""
        pairs = [checked_pair(batch, self.device) for batch in read_quietly(loader)]
        if not pairs:
            raise ValueError("The loader has no batches.")
        x, y = join_inputs([x for x, _ in pairs]), self._cast(torch.cat([y for _, y in pairs]))
        x = x.mapped(self._cast) if isinstance(x, Inputs) else self._cast(x)
        counted = self.likelihood.counted(y).examples
        seen = float(len(y)) if counted is None else float(counted)
        advice = (
            f"their log-likelihood is scaled to that of {self.data_size:,}. Give data_size={seen:.0f}; to weight the "
            "data differently, set temperature."
        )
        warn_of_data_size(self, seen, "the loader has", advice)
        return Data(x, y, self.data_size / seen)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _key(self, net: nn.Module, data: Data) -> str:
        """Digest of all that a run depends on."""
        tensors = [tensor for _, tensor in sorted(net.state_dict().items())]
        settings = {**self.config(), "steps": self.steps, "data_size": self.data_size}
        return digest(json.dumps(settings, sort_keys=True, default=str), data.y, *tensors_of(data.x), *tensors)

    def _warn(self) -> None:
        """Say what makes these samples no reference."""
        found, alike = self.summary, without_fresh_start(self.model, self.layout)
        problems = []
        if found.divergences:
            part = found.divergences / found.transitions
            problems.append(
                f"{found.divergences:.0f} of {found.transitions:.0f} transitions diverged ({part:.1%}): the chains "
                "avoid regions where the posterior is narrow. Try settings={'target_accept': 0.95}, or float64"
            )
        if found.lowest_acceptance < _LEAST_ACCEPTANCE:
            problems.append(
                f"a chain accepted {found.lowest_acceptance:.0%} of its transitions: it is stuck. Try a longer warmup, "
                "or settings={'target_accept': 0.95}"
            )
        if alike:
            problems.append(
                f"{', '.join(alike[:3])} started alike in every chain, since no module with reset_parameters owns them"
            )
        if self.layout.size > MOST_WEIGHTS:
            problems.append(f"{self.layout.size:,} weights are more than chains mix over in reasonable time")
        if problems:
            warn(f"HMC: {'; '.join(problems)}.", CredoWarning)

    def describe(self) -> Description:
        """Prior, temperature, and the kept samples."""
        chains, kept, _ = self.samples.shape
        return Description(
            prior=self.prior,
            layout=self.layout,
            temperature=self.temperature,
            spread_count=self.samples.numel() if self.has_samples else 0,
            chains=KeptChains(chains, kept, self._sample_at) if self.has_samples else None,
        )


def _check(temperature: Any, likelihood: Likelihood) -> None:
    """Raise ValueError for arguments that are not possible."""
    if not is_number(temperature) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be a positive number; 1 is the posterior itself.")
    if isinstance(likelihood, GaussianNoise) and likelihood.beta:
        raise ValueError(f"beta={likelihood.beta} makes no likelihood, and so no posterior: HMC needs beta=0.")


def _check_memory(chains: int, kept: int, layout: Layout, device: torch.device) -> None:
    """Raise UnsupportedModelError if the samples do not fit, before they are allocated."""
    needed, available = chains * kept * layout.size * layout.dtype.itemsize, available_bytes(device)
    if 2 * needed > available:
        raise UnsupportedModelError(
            f"{chains * kept} samples of {layout.size:,} weights need {2 * needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free: keep fewer (samples=…), or choose fewer weights (random='last')."
        )


@contextmanager
def _shown(total: int, *, progress: bool) -> Iterator[Callable[[Chains], None]]:
    """A bar over all transitions, on an interactive terminal."""
    if not progress:
        yield lambda chains: None
        return
    with make_progress() as bar:
        task = bar.add_task("chains", total=total, text="")

        def show(chains: Chains) -> None:
            text = "warm-up" if chains.index < chains.adaptation.warmup else f"{chains.divergences} divergences"
            bar.update(task, completed=chains.index, text=text)

        yield show
