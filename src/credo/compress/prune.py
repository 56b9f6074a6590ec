"""Pruning: set the least important weights to exactly zero, in the mean and in every draw.

By |mean|/std, as Zhang and Chen (2020) prune Bayes by Backprop, or by |mean|, as Shridhar et al. (2019) do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credo.compress.ranking import keep_above, keep_highest, signal_to_noise, unit_norms
from credo.compress.structure import NORMS, Connection, connections
from credo.core.description import HasMoments
from credo.core.errors import UnsupportedModelError, unknown
from credo.core.network.layer_hooks import parameter_names
from credo.core.network.selection import Random, join, random_names
from credo.core.posterior import Posterior

CRITERIA = ("snr", "magnitude")
STRUCTURES = ("weights", "units")


def prune(
    posterior: Posterior,
    *,
    rate: float = 0.75,
    by: str = "snr",
    scope: str = "global",
    threshold: float | None = None,
    structure: str = "weights",
    parameters: Random = "weights",
) -> dict[str, Tensor]:
    """Prune a posterior in place; returns a mask for each parameter, False where it is pruned.

    Training may continue: pruned weights stay zero, also in saved files.

    Args:
        posterior: MAP, BBB, VOGN, IVON or a diagonal Laplace.
        rate: Fraction of the weights to prune, including those pruned before.
        by: Score: `"snr"`, |mean|/std, or `"magnitude"`, |mean|.
        scope: Rank weights over the whole network (`"global"`) or within each `"layer"`.
        threshold: Prune all weights with a lower score instead of a fraction.
        structure: `"weights"`, or `"units"`: whole units or channels that `compact` can remove, with their bias,
            normalisation and outgoing weights.
        parameters: Which parameters to prune, as `random=` selects them; by default no biases and normalisation layers.
    """
    masks = choose_masks(
        posterior, rate=rate, by=by, scope=scope, threshold=threshold, structure=structure, parameters=parameters
    )
    if not all(bool(mask.all()) for mask in masks.values()):
        posterior.keep_(masks)
    return posterior.masks()


def choose_masks(
    posterior: Posterior,
    *,
    rate: float = 0.75,
    by: str = "snr",
    scope: str = "global",
    threshold: float | None = None,
    structure: str = "weights",
    parameters: Random = "weights",
) -> dict[str, Tensor]:
    """Return the masks that `prune` would apply, without applying them.

    Args:
        posterior: The posterior, which is not changed.
        rate: As in `prune`.
        by: As in `prune`.
        scope: As in `prune`.
        threshold: As in `prune`.
        structure: As in `prune`.
        parameters: As in `prune`.
    """
    check_prunable(posterior)
    if structure not in STRUCTURES:
        raise ValueError(unknown("structure", structure, STRUCTURES))
    found = connections(posterior.model) if structure == "units" else []
    scores = weight_scores(posterior, by=by, parameters=parameters)
    if structure == "units":
        scores = unit_scores(posterior, found, by=by)
    masks = keep_highest(scores, rate, scope=scope) if threshold is None else keep_above(scores, threshold)
    return masks if structure == "weights" else _whole_units(posterior, found, masks, scores)


def check_prunable(posterior: Posterior) -> None:
    """Raise if single weights of a method cannot be pruned."""
    if not isinstance(posterior, Posterior):
        raise ValueError(f"Pruning needs a posterior, such as MAP(model, ...); got a {type(posterior).__name__}.")
    if type(posterior).keep_ is Posterior.keep_:
        posterior.keep_({})  # raises with the reason


def weight_scores(posterior: Posterior, *, by: str = "snr", parameters: Random = "weights") -> dict[str, Tensor]:
    """The score of each weight of `posterior`, by parameter name; `by` and `parameters` as in `prune`."""
    mean, std = _moments(posterior, by)
    chosen = [name for name in random_names(posterior.model, parameters) if name in mean]
    if not chosen:
        raise ValueError(f"parameters={parameters!r} selects none of the random ones: {', '.join(mean)}.")
    return {name: signal_to_noise(mean[name], std[name]) if by == "snr" else mean[name].abs() for name in chosen}


def unit_scores(posterior: Posterior, found: list[Connection], *, by: str = "snr") -> dict[str, Tensor]:
    """The score of each unit of `posterior`, by the path of its layer, from the connections `found`.

    It is the root mean square of its incoming and outgoing means, for `by="snr"` over that of their deviations.
    """
    if not found:
        raise UnsupportedModelError(
            f"{type(posterior.model).__name__} has no removable units: more than one layer uses the outputs of every "
            "layer. Prune single weights: structure='weights'."
        )
    mean, std = _moments(posterior, by)
    own = {name: p.detach() for name, p in posterior.model.named_parameters()}
    means, stds = {**own, **mean}, {**{name: torch.zeros_like(p) for name, p in own.items()}, **std}
    scores = {}
    for connection in found:
        signal = unit_norms(_of_units(connection, means))
        scores[connection.source] = (
            signal_to_noise(signal, unit_norms(_of_units(connection, stds))) if by == "snr" else signal
        )
    return scores


def _of_units(connection: Connection, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Incoming and outgoing weights of each unit, with units as the first dimension."""
    into = [tensors[name] for key in ("weight", "bias") if (name := join(connection.source, key)) in tensors]
    return [*into, tensors[join(connection.target, "weight")].transpose(0, 1).reshape(len(into[0]), -1)]


def _moments(posterior: Posterior, by: str) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    if by not in CRITERIA:
        raise ValueError(unknown("by", by, CRITERIA))
    if not isinstance(posterior, HasMoments):
        if by == "snr":
            raise ValueError(f"{type(posterior).__name__} has no standard deviations: use by='magnitude'.")
        return {name: p.detach() for name, p in posterior.model.named_parameters()}, {}
    std = posterior.std()
    if by == "snr" and not any(bool((s > 0).any()) for s in std.values()):
        raise ValueError("All standard deviations are zero: train a step first, or prune with by='magnitude'.")
    return posterior.mean(), std


def _whole_units(
    posterior: Posterior, found: list[Connection], units: Mapping[str, Tensor], scores: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Parameter masks from unit masks; the best unit of each layer is always kept."""
    model: Any = posterior.model
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for connection in found:
        stays = units[connection.source].clone()
        stays[scores[connection.source].argmax()] = True
        norms = [s for s in connection.steps if isinstance(s, str) and isinstance(model.get_submodule(s), NORMS)]
        for path in (connection.source, *norms):
            for name in parameter_names(path, model.get_submodule(path)):
                masks[name][~stays] = False
        masks[join(connection.target, "weight")][:, ~stays.repeat_interleave(connection.fan_out)] = False
    return masks
