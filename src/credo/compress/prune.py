"""Pruning: weights that say least become exactly zero, in the mean and in every draw.

By |mean|/std, as Zhang and Chen (2020) prune Bayes by Backprop, or by |mean|, as Shridhar et al. (2019) do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credo.compress.ranking import keep_above, keep_highest, signal_to_noise, unit_norms
from credo.compress.structure import NORMS, Link, links
from credo.core.errors import UnsupportedModelError, unknown
from credo.core.network.layer_hooks import parameter_names
from credo.core.network.selection import Random, join, random_names
from credo.core.posterior import GaussianPosterior, Posterior

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
    """Prune a posterior in place; returns a mask for each parameter, False where it is zero from now on.

    `rate` is the share of weights that go, of all together (`scope="global"`) or of each layer; `threshold` prunes
    what scores less instead. What was pruned before counts and stays pruned. `parameters` chooses as `random=` does;
    by default biases and normalisation layers are left alone. `structure="units"` prunes whole units or channels that
    `compact` can remove, with their biases, normalisation and all that the next layer reads from them. Training may go
    on: masks hold, and go into saved files.
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
    """The masks that `prune` would give its posterior, which stays as it is."""
    check_prunable(posterior)
    if structure not in STRUCTURES:
        raise ValueError(unknown("structure", structure, STRUCTURES))
    found = links(posterior.model) if structure == "units" else []
    scores = weight_scores(posterior, by=by, parameters=parameters)
    if structure == "units":
        scores = unit_scores(posterior, found, by=by)
    masks = keep_highest(scores, rate, scope=scope) if threshold is None else keep_above(scores, threshold)
    return masks if structure == "weights" else _whole_units(posterior, found, masks, scores)


def check_prunable(posterior: Posterior) -> None:
    """Refuse methods whose weights cannot be zero one by one."""
    if not isinstance(posterior, Posterior):
        raise ValueError(f"Pruning needs a posterior, such as MAP(model, ...); got a {type(posterior).__name__}.")
    if type(posterior).keep_ is Posterior.keep_:
        posterior.keep_({})  # says why not


def weight_scores(posterior: Posterior, *, by: str = "snr", parameters: Random = "weights") -> dict[str, Tensor]:
    """The score of each weight, by parameter name: |mean|/std or |mean|."""
    mean, std = _moments(posterior, by)
    chosen = [name for name in random_names(posterior.model, parameters) if name in mean]
    if not chosen:
        raise ValueError(f"parameters={parameters!r} chooses none of the random ones: {', '.join(mean)}.")
    return {name: signal_to_noise(mean[name], std[name]) if by == "snr" else mean[name].abs() for name in chosen}


def unit_scores(posterior: Posterior, found: list[Link], *, by: str = "snr") -> dict[str, Tensor]:
    """The score of each unit, by the path of its layer: the root mean square of its weights, incoming and outgoing.

    For `by="snr"` that of their means over that of their standard deviations.
    """
    if not found:
        raise UnsupportedModelError(
            f"{type(posterior.model).__name__} has no units that could go: of every layer more than one other reads "
            "the outputs. Prune single weights: structure='weights'."
        )
    mean, std = _moments(posterior, by)
    own = {name: p.detach() for name, p in posterior.model.named_parameters()}
    means, stds = {**own, **mean}, {**{name: torch.zeros_like(p) for name, p in own.items()}, **std}
    scores = {}
    for link in found:
        signal = unit_norms(_of_units(link, means))
        scores[link.source] = signal_to_noise(signal, unit_norms(_of_units(link, stds))) if by == "snr" else signal
    return scores


def _of_units(link: Link, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What leads into each unit of a link, and what is read from it, with units first."""
    into = [tensors[name] for key in ("weight", "bias") if (name := join(link.source, key)) in tensors]
    return [*into, tensors[join(link.target, "weight")].transpose(0, 1).reshape(len(into[0]), -1)]


def _moments(posterior: Posterior, by: str) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    if by not in CRITERIA:
        raise ValueError(unknown("by", by, CRITERIA))
    if not isinstance(posterior, GaussianPosterior):
        if by == "snr":
            raise ValueError(f"{type(posterior).__name__} has no standard deviations: prune it with by='magnitude'.")
        return {name: p.detach() for name, p in posterior.model.named_parameters()}, {}
    std = posterior.std()
    if by == "snr" and not any(bool((s > 0).any()) for s in std.values()):
        raise ValueError("All standard deviations are zero: train a step first, or prune with by='magnitude'.")
    return posterior.mean(), std


def _whole_units(
    posterior: Posterior, found: list[Link], units: Mapping[str, Tensor], scores: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Masks of parameters from masks of units; the best unit of a layer always stays."""
    model: Any = posterior.model
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for link in found:
        stays = units[link.source].clone()
        stays[scores[link.source].argmax()] = True
        norms = [s for s in link.steps if isinstance(s, str) and isinstance(model.get_submodule(s), NORMS)]
        for path in (link.source, *norms):
            for name in parameter_names(path, model.get_submodule(path)):
                masks[name][~stays] = False
        masks[join(link.target, "weight")][:, ~stays.repeat_interleave(link.spread)] = False
    return masks
