"""Running statistics of normalisation layers: do they match the weights?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor, nn

from credo.core.network.batchnorm import refresh_statistics
from credo.core.network.selection import join
from credo.core.network.substitute import substituted
from credo.core.posterior import Posterior
from credo.doctor.measure.predictive import Predictive, predict_draws
from credo.doctor.measure.scores import Gap, Score, gap, score
from credo.doctor.no_side_effects import copied_buffers, leaves, without_side_effects
from credo.doctor.subset import Subset

Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class NormState:
    """Distance between running and fresh statistics of one normalisation layer, averaged over channels.

    `mean_shift` is |difference of means| in running standard deviations, `std_shift` |log(fresh std / running std)|;
    both for weight draws, `*_of_mean` for the mean network.
    """

    name: str
    mean_shift: float
    std_shift: float
    mean_shift_of_mean: float
    std_shift_of_mean: float


@dataclass(frozen=True)
class Statistics:
    """All normalisation layers with running statistics.

    `shift` is the largest of any layer for weight draws, `shift_of_mean` for the mean network; `refreshed` is the
    ensemble after `credo.refresh_statistics(posterior, loader)`, `gain` how much worse it is without that.
    """

    layers: list[NormState]
    shift: float
    shift_of_mean: float
    refreshed: Score
    gain: Gap


def statistics(
    posterior: Posterior, train: Subset, test: Subset, before: Predictive, *, seed: int = 0
) -> Statistics | None:
    """Compare running statistics of `posterior` with fresh ones on `train`; None without such layers.

    Predictions for `test` with fresh statistics are compared with those `before`. `seed` is that of the draws.
    """
    parts = leaves(posterior)
    norms = {path: m for path, m in parts[0].model.named_modules() if _has_statistics(m)}
    if not norms or len(train) < 2:
        return None
    drawn = [fresh_statistics(leaf, train, under_draws=True, seed=seed) for leaf in parts]
    of_mean = [fresh_statistics(leaf, train, under_draws=False, seed=seed) for leaf in parts]
    layers = [_state(path, parts, drawn, of_mean) for path in norms]
    with ExitStack() as stack:
        for leaf, buffers in zip(parts, drawn, strict=True):
            stack.enter_context(substituted(leaf.model, buffers))
        after = predict_draws(posterior, test, draws=before.draws, seed=seed)
    return Statistics(
        layers=layers,
        shift=max(max(layer.mean_shift, layer.std_shift) for layer in layers),
        shift_of_mean=max(max(layer.mean_shift_of_mean, layer.std_shift_of_mean) for layer in layers),
        refreshed=score(after),
        gain=gap(before, after),
    )


def fresh_statistics(leaf: Posterior, train: Subset, *, under_draws: bool, seed: int = 0) -> Buffers:
    """Copies of all buffers of `leaf` after `refresh_statistics` on `train`.

    With `under_draws` every batch has a new draw by `seed`, else all have the mean network.
    """
    buffers = copied_buffers(leaf.model)
    size = train.batch_size if len(train) % train.batch_size != 1 else train.batch_size + 1  # no batch of one
    batches = [x.to(leaf.device) for x, _ in train.split(max(size, 2)) if len(x) > 1]
    with without_side_effects(leaf, seed), substituted(leaf.model, buffers):
        refresh_statistics(leaf if under_draws else leaf.model, batches)
    return buffers


def shifts(running: Mapping[str, Tensor], now: Mapping[str, Tensor], path: str, eps: float) -> tuple[float, float]:
    """Mean and std shift from `running` buffers to those `now`, of the layer at `path` with this `eps`."""
    names = join(path, "running_mean"), join(path, "running_var")
    old_mean, old_var, new_mean, new_var = (source[name].double().cpu() for source in (running, now) for name in names)
    mean_shift = (new_mean - old_mean).abs() / (old_var + eps).sqrt()
    std_shift = 0.5 * ((new_var + eps) / (old_var + eps)).log().abs()
    return float(mean_shift.mean()), float(std_shift.mean())


def _state(path: str, parts: list[Posterior], drawn: list[Buffers], of_mean: list[Buffers]) -> NormState:
    found = []
    for leaf, under_draws, mean in zip(parts, drawn, of_mean, strict=True):
        running = dict(leaf.model.named_buffers())
        eps = float(getattr(leaf.model.get_submodule(path), "eps", 0.0))
        found.append((*shifts(running, under_draws, path, eps), *shifts(running, mean, path, eps)))
    averages = [sum(values) / len(found) for values in zip(*found, strict=True)]
    return NormState(path, *averages)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
