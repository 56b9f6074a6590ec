"""Plan a training: what was left open is chosen for its length, and the temperature by two short trainings before it.

Clean data of a sharp function need a low temperature, else the network stays flat; noisy data need a high one, else it
learns the noise. Numbers of rows, inputs and weights do not tell them apart. So a cold and a warm plan are tried for a
sixth of the epochs on two thirds of the rows; the one that is better on the other third is taken, if beyond chance.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import NonFiniteError
from credo.core.likelihood import Categorical, GaussianNoise
from credo.core.network.inputs import read_batches, split_batch
from credo.core.posterior import Posterior
from credo.methods.planning import FEWEST_EPOCHS
from credo.predict import ClassPrediction, RegressionPrediction, predict
from credo.training.epoch_batches import Loader, seeded_epoch
from credo.training.rows.given_back import GivenBack
from credo.training.rows.held_out import hold_out

# Parts of the epochs and of the rows that a short training has, and most steps of one.
PART, HELD_OUT_PART, MOST_STEPS = 1 / 6, 1 / 3, 1000
# Standard errors by which a plan must be better. A short training has learned less noise than a long one will, which
# favours the cold plan.
COLD_BY, WARM_BY = 1.0, 0.5
# Nats between a network and a constant prediction.
NOTHING_LEARNED = 0.02
DRAWS = 8

Train = Callable[..., Iterable[Any]]


def plan_training(
    posterior: Posterior,
    loader: Loader,
    given_back: GivenBack | None,
    epochs: int,
    train: Train | None,
    **options: Any,
) -> None:
    """Let every part of the posterior choose what was left open.

    Args:
        posterior: Before its first step.
        loader: The training batches.
        given_back: Says which of them are held out at first; None: none are.
        epochs: Epochs of the training.
        train: The training loop, by which two plans of the temperature are tried; None: they are not.
        options: Options of `train` for the short trainings: `seed`, `forward`, `target` and what else differs.
    """
    plan = None
    if train is not None and epochs >= FEWEST_EPOCHS and _is_open(posterior):
        plan = _tried(posterior, given_back.rest if given_back else loader, epochs, train, options)
    steps = given_back.steps if given_back else epochs * len(loader)
    for part in posterior.all_posteriors():
        if plan is None:
            part.plan_training_(steps=steps, epochs=epochs)
        else:
            part.plan_as_(plan, steps=steps, epochs=epochs)


def chosen(cold: Tensor, warm: Tensor, constant: float) -> str | None:
    """The plan that is better beyond chance, if one is; None also if the cold one learned neither function nor noise.

    Args:
        cold: NLL of each held-out row after the cold training.
        warm: The same after the warm one.
        constant: Mean NLL of a constant prediction.
    """
    if not torch.isfinite(warm).all():
        return "cold" if torch.isfinite(cold).all() else None
    if not torch.isfinite(cold).all():
        return "warm"
    if abs(float(cold.mean()) - constant) < NOTHING_LEARNED:
        return None
    difference = (cold - warm).double()
    error = float(difference.std()) / math.sqrt(len(difference))
    if difference.mean() < -COLD_BY * error:
        return "cold"
    return "warm" if difference.mean() > WARM_BY * error else None


def constant_loss(y: Tensor) -> float:
    """The mean NLL of the best constant prediction of labels [rows] or values [rows, targets]."""
    if y.is_floating_point():
        return float((0.5 * (2 * math.pi * math.e * y.double().var(0, correction=0)).log()).sum())
    shares = torch.bincount(y).double() / len(y)
    return float(-torch.special.xlogy(shares, shares).sum())


def _is_plain(batch: Any) -> bool:
    """Whether the targets of a batch are values, or one label for each row; True where its form does not say."""
    try:
        y = split_batch(batch)[1]
    except (TypeError, ValueError):
        return True
    return not isinstance(y, Tensor) or y.is_floating_point() or (y.dim() == 1 and not bool((y < 0).any()))


def _is_open(posterior: Posterior) -> bool:
    """Whether plans can be tried: one posterior in one process, of labels or values, with an open temperature."""
    if len(posterior.all_posteriors()) != 1 or posterior.process_group is not None or not posterior.tries_plans:
        return False
    likelihood = posterior.likelihood
    is_known = type(likelihood) is Categorical or (type(likelihood) is GaussianNoise and not likelihood.heteroscedastic)
    return is_known and posterior.arguments.get("temperature") is None


def _tried(posterior: Posterior, loader: Loader, epochs: int, train: Train, options: Mapping[str, Any]) -> str | None:
    """The plan that held-out rows choose after short trainings; None without a choice."""
    seed = options["seed"]
    try:
        rest, held_out = hold_out(loader, seed, part=HELD_OUT_PART)
    except ValueError:  # a loader that cannot be divided, or too few rows
        return None
    losses: dict[str, Tensor] = {}
    constant = math.inf
    with seeded_epoch(loader, seed, 0, posterior.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with a plan that is not taken is of no use
        rows = read_batches(list(held_out), options["forward"], options["target"])
        if not all(map(_is_plain, held_out)):
            return None  # labels of positions, or that are to be ignored
        short = max(1, min(round(PART * epochs), math.ceil(MOST_STEPS / len(rest))))
        for plan in ("cold", "warm"):
            copied = copy.deepcopy(posterior)
            copied.plan_as_(plan, steps=short * len(rest), epochs=epochs, is_short=True)
            try:
                for _ in train(copied, rest, epochs=short, **options):
                    pass
                prediction = predict(copied, rows, draws=DRAWS)
            except NonFiniteError:
                losses[plan] = torch.tensor([math.inf])
                continue
            y, log_likelihood = prediction.targets, prediction.log_likelihood
            if (
                y is None
                or log_likelihood is None
                or not isinstance(prediction, ClassPrediction | RegressionPrediction)
            ):
                return None  # labels of positions
            losses[plan], constant = -log_likelihood, constant_loss(y)
    return chosen(losses["cold"], losses["warm"], constant)
