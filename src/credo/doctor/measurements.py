"""`Measurements`: everything measured of one posterior, the input of the rules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from credo.core.arguments import argument_names
from credo.core.likelihood import GaussianNoise
from credo.core.likelihood.target_scale import TargetScale
from credo.core.posterior import Posterior
from credo.doctor.measure.dispersion import Dispersion
from credo.doctor.measure.far import FarInputs
from credo.doctor.measure.gradients import GradientNoise
from credo.doctor.measure.inputs import InputScale
from credo.doctor.measure.layers import LayerState, gaussian_leaves
from credo.doctor.measure.monte_carlo import MonteCarlo
from credo.doctor.measure.objective import History, Objective
from credo.doctor.measure.ood import Detection
from credo.doctor.measure.prior_scales import PriorScales
from credo.doctor.measure.scores import Scores, bounds
from credo.doctor.measure.statistics import Statistics
from credo.doctor.no_side_effects import leaves
from credo.evaluate.fidelity.chain_study import ChainStudy


@dataclass(frozen=True)
class MethodInfo:
    """Properties of the method; for a mixture those of its first member.

    `arguments` are the names of its constructor's, also of single fields of groups (`init.std`), `noise` is how
    training samples the weights, `fixed_noise_level` whether the likelihood is Gaussian with a fixed standard
    deviation, `rate` the dropout rate that it sets, `likelihood` the kind of the targets' distribution.
    """

    name: str
    random: bool
    gaussian: bool
    members: int
    has_prior: bool
    noise: str | None
    fixed_noise_level: bool
    rate: float | None
    arguments: frozenset[str]
    lr: float | None = None
    default_lr: float | None = None
    likelihood: str = ""

    @property
    def dropout_masks(self) -> bool:
        """Whether draws are dropout masks, so that there is no σ."""
        return "rate" in self.arguments and not self.gaussian


@dataclass(frozen=True)
class Counts:
    """Size of the training loader and of the objective, and how many examples were `measured` in training.

    `evaluated` examples, `held_out` or not, are those that predictions were scored on.
    """

    examples: int
    data_size: int
    batches: int
    batch_size: int
    measured: int
    evaluated: int
    held_out: bool


@dataclass(frozen=True)
class Measurements:
    """All measurements; None where one does not exist for this posterior.

    `epochs` is the length of training, from its log or from the step count, `targets` is there if they are in units
    that the last layer does not reach, `detection` has an entry for each set of
    out-of-distribution inputs that was given.
    """

    method: MethodInfo
    counts: Counts
    objective: Objective
    weights: LayerState | None
    layers: list[LayerState]
    gradient: GradientNoise
    scores: Scores
    statistics: Statistics | None
    dispersion: Dispersion
    train_dispersion: Dispersion
    monte_carlo: MonteCarlo | None
    history: History | None
    epochs: int | None = None
    inputs: InputScale | None = None
    targets: TargetScale | None = None
    detection: Sequence[Detection] = ()
    prior_scales: PriorScales | None = None
    chains: ChainStudy | None = None
    far: FarInputs | None = None

    def to_dict(self) -> dict[str, Any]:
        """The measurements as plain numbers."""
        method = asdict(self.method)
        for name in ("arguments", "lr", "default_lr", "likelihood"):
            del method[name]
        return {
            "method": method,
            "data": asdict(self.counts),
            "objective": asdict(self.objective),
            "weights": _plain(self.weights),
            "gradient": asdict(self.gradient),
            "scores": self.scores.to_dict(),
            "statistics": None if self.statistics is None else _statistics(self.statistics, self.scores.metric),
            "dispersion": self.dispersion.to_dict(),
            "train_dispersion": self.train_dispersion.to_dict(),
            "monte_carlo": _plain(self.monte_carlo),
            "history": _plain(self.history),
            "inputs": _plain(self.inputs),
            "targets": None if self.targets is None else self.targets._asdict(),
            "detection": [found.to_dict() for found in self.detection],
            "prior_scales": _plain(self.prior_scales),
            "far": _plain(self.far),
            "chains": None if self.chains is None else self.chains._asdict(),
        }


def method_info(posterior: Posterior) -> MethodInfo:
    """The properties of a posterior's method."""
    parts = leaves(posterior)
    first, likelihood = parts[0], parts[0].likelihood
    about, parameters = first.describe(), inspect.signature(type(first)).parameters
    return MethodInfo(
        name=type(posterior).__name__,
        random=posterior.is_random,
        gaussian=len(gaussian_leaves(posterior)) == len(parts),
        members=len(parts),
        has_prior=any(leaf.describe().has_prior for leaf in parts),
        noise=about.noise,
        fixed_noise_level=isinstance(likelihood, GaussianNoise)
        and not (likelihood.learn or likelihood.heteroscedastic),
        rate=about.rate,
        arguments=frozenset(argument_names(type(first))),
        lr=_rate(first.config().get("lr")),
        default_lr=_rate(getattr(first, "default_lr", parameters["lr"].default)) if "lr" in parameters else None,
        likelihood=likelihood.kind,
    )


def _rate(given: object) -> float | None:
    """A learning rate, or that of all other parameters where rates are given by name."""
    rate = given.get("*") if isinstance(given, Mapping) else given
    return float(rate) if isinstance(rate, int | float) else None


def _statistics(found: Statistics, metric: str) -> dict[str, Any]:
    return {
        "layers": [asdict(layer) for layer in found.layers],
        "shift": found.shift,
        "shift_of_mean": found.shift_of_mean,
        "refreshed": {metric: found.refreshed.metric, "nll": found.refreshed.nll},
        "gain": {"nll": bounds(found.gain.nll), "error": bounds(found.gain.error)},
    }


def _plain(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
