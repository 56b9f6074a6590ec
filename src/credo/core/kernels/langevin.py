"""Compiled steps of Langevin dynamics over flat vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from credo.core.kernels.flat import INT64, TensorList, address, loaded, threads_for, word


def langevin_(
    weights: TensorList,
    gradients: TensorList,
    roots: Sequence[float],
    velocity: Tensor | None,
    *,
    size: int,
    random: int,
    keep: float,
    noise: float,
    prior: tuple[float, float],
    key: int,
) -> float:
    """One Langevin step in place; returns Σ (w − prior mean)² over the random weights before it.

    velocity ← keep·velocity − root·(gradient + pull·(w − prior mean)) + noise·noise(key), w ← w + root·velocity.

    Args:
        weights: Weights, the random ones first.
        gradients: Gradients of the loss.
        roots: Root of the learning rate of each tensor.
        velocity: Velocities; None: none are kept from step to step.
        size: Number of weights.
        random: How many of them have a prior and noise.
        keep: Part of the velocity that stays.
        noise: Standard deviation of the noise.
        prior: Its mean and its pull.
        key: Key of the noise.
    """
    library = loaded()
    library.credo_langevin.restype = ctypes.c_double
    velocities = ctypes.c_void_p(None) if velocity is None else address(velocity)
    mean, pull = (ctypes.c_float(number) for number in prior)
    return float(
        library.credo_langevin(
            weights.pointers, gradients.pointers, weights.sizes, INT64(weights.count),
            (ctypes.c_float * len(roots))(*roots), velocities, INT64(size), INT64(random), ctypes.c_float(keep),
            ctypes.c_float(noise), pull, mean, word(key), threads_for(size),
        )
    )  # fmt: skip
