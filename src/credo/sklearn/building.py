"""Build the network and the posterior from an estimator's parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from credo.core.arguments import current_arguments
from credo.core.errors import unknown
from credo.core.likelihood import Likelihood
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.core.support.user_warnings import warn
from credo.experiments.config import MEMBER_SEEDS
from credo.experiments.options import method_options, with_batches
from credo.methods import METHODS, Ensemble
from credo.models import build_model
from credo.models.blocks import init_from

Model = nn.Module | Callable[[int, int], nn.Module] | None
RandomState = int | np.random.RandomState | None
_DROPOUT_RATE = 0.1


@dataclass(frozen=True)
class Common:
    """Options for all methods; each takes those that its constructor has.

    If `lr` is None, `rates` has default learning rates by an argument of the methods that they are for.
    """

    data_size: int
    batches: int
    lr: float | None
    rates: Mapping[str, float]
    prior_precision: float
    temperature: float


def make_seed(random_state: RandomState) -> int:
    """An integer seed from a scikit-learn random state; None takes entropy from the system, not from `np.random`."""
    if random_state is None:
        return int(np.random.default_rng().integers(2**31 - 1))
    if isinstance(random_state, int | np.integer):
        random_state = np.random.RandomState(int(random_state))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    raise ValueError(f"random_state={random_state!r} must be an integer, a numpy RandomState or None.")


def make_network(model: Model, hidden: Sequence[int], inputs: int, outputs: int, *, seed: int) -> nn.Module:
    """A copy of `model`, or what it makes of (`inputs`, `outputs`), or a perceptron with `hidden` layers by `seed`."""
    if model is None:
        return build_model("mlp", inputs=[inputs], classes=outputs, hidden=hidden, seed=seed)
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if not callable(model):
        raise ValueError(f"model={model!r} must be an nn.Module, a function (inputs, outputs) -> nn.Module, or None.")
    with init_from(seed):
        made = model(inputs, outputs)
    if not isinstance(made, nn.Module):
        raise ValueError(f"model({inputs}, {outputs}) must return an nn.Module, got a {type(made).__name__}.")
    return made


def make_posterior(
    name: str,
    options: Mapping[str, Any],
    common: Common,
    *,
    network: Callable[[int], nn.Module],
    likelihood: Callable[[], Likelihood],
    seed: int,
) -> Posterior:
    """Build the posterior of a method.

    Args:
        name: Name of the method.
        options: Arguments of its constructor, which override `common`; for an ensemble `members` and `of`, the name and
            options of one member.
        common: Options for all methods.
        network: Makes a network from a seed; called once for each member.
        likelihood: Makes a likelihood; called once for each member.
        seed: Seed of the posterior.
    """
    options = _current_options(name, options)
    if METHODS[name] is Ensemble:
        member, of = member_of(options)
        if member == name:
            raise ValueError("method_options={'of': …} describes one member, which cannot be an ensemble itself.")
        seeds = [seed + MEMBER_SEEDS * index for index in range(options.get("members", 5))]
        build = partial(make_posterior, member, of, common, network=network, likelihood=likelihood)
        return Ensemble([build(seed=one) for one in seeds])
    model = network(seed)
    options = with_batches(METHODS[name], options, common.batches)
    arguments = {**_common_options(name, common), **_dropout_rate(name, model)}
    if any(key in options for key in ("prior", "prior_precision", "weight_decay")):  # each replaces the others
        arguments = {key: value for key, value in arguments.items() if key not in ("prior", "prior_precision")}
    return METHODS[name](model, **{**arguments, "seed": seed, "likelihood": likelihood(), **options})


def member_of(options: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Name and options of one member, from an ensemble's options."""
    of = (options or {}).get("of", {})
    if not isinstance(of, Mapping):
        raise ValueError(f"of={of!r} must be a dict such as {{'name': 'bbb', 'init': 0.05}}: one member.")
    return str(of.get("name", "map")), {key: value for key, value in of.items() if key != "name"}


def _current_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by their names of this version; raises ValueError for one that the method does not have."""
    if name not in METHODS:
        raise ValueError(unknown("method", str(name), METHODS))
    options, old_names = current_arguments(METHODS[name], options)
    for one in old_names:
        text = f"method_options={{{one.old!r}: …}} is now {one.python}; the old name goes in {one.until}."
        warn(text, DeprecationWarning)
    known = method_options(name)
    for key in options:
        if key not in known:
            raise ValueError(unknown(f"option of {name} in method_options", str(key), known))
    return options


def _common_options(name: str, common: Common) -> dict[str, Any]:
    """The common options that this method takes."""
    known = inspect.signature(METHODS[name]).parameters
    lr = next((rate for key, rate in common.rates.items() if key in known), None) if common.lr is None else common.lr
    taken = {key: value for key, value in {**vars(common), "lr": lr}.items() if key in known and value is not None}
    if "weight_prior" in known:  # the prior is that of node variables
        taken.pop("prior_precision")
    elif "prior" in known and not ("prior_precision" in known and "temperature" in known):
        # Without a temperature, the precision scales the prior's term of the loss.
        precision = taken.pop("prior_precision", common.prior_precision)
        precision *= 1.0 if "temperature" in known else common.temperature
        taken["prior"] = Gaussian(std=precision**-0.5) if precision else None
    return taken


def _dropout_rate(name: str, model: nn.Module) -> dict[str, Any]:
    """A rate for MC-dropout, if the network has no dropout layers."""
    own = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in model.modules())
    return {} if own or "rate" not in inspect.signature(METHODS[name]).parameters else {"rate": _DROPOUT_RATE}
