"""The noise that the steps of Bayes by Backprop sample with: of weights, of activations, or adversarial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from credo.methods.adversarial_sampling import NAME as ADVERSARIAL
from credo.methods.adversarial_sampling import AdversarialSampling, is_attack, make_attack, unknown_noise
from credo.methods.bbb.activation_noise import NOISES

NOISE_NAMES = ("weights", *NOISES, ADVERSARIAL)
Noise = str | AdversarialSampling | Mapping[str, Any]


def chosen_noise(given: Noise) -> tuple[AdversarialSampling | None, str]:
    """The adversarial sampling that is meant, if any, and the name of the noise of plain passes.

    Args:
        given: The argument `noise`; raises ValueError for an unknown one.
    """
    if is_attack(given):
        return make_attack(given), "weights"
    if given not in NOISE_NAMES:
        raise unknown_noise(given, NOISE_NAMES)
    return None, str(given)
