"""Arguments that a user left open (None), chosen by `fit` for the length of the training.

Two things depend on it. A posterior that has seen each example a few times only has had no time to overfit, and a cold
one, which learns faster, predicts better; and averages over past steps should span a fixed part of the training.
"""

from __future__ import annotations

import math

from credo.core.support.validate import is_number

# Temperatures of a long training. Noise in the weights at temperature 1 costs more accuracy than it gains in
# calibration on usual data sets; of these labels are clean, "curated", which is evidence for each by several people
# (Aitchison 2021), so that the posterior of classifiers is colder still.
TEMPERATURES = {"regression": 0.5, "classification": 0.2}
# Precision of the prior of natural-gradient methods, whose pull on the weights a low temperature makes weak.
PRIOR_PRECISION = 5.0
# Epochs after which the temperature is that of a long training; it is proportional to them below.
LONG_TRAINING = 20.0
# Averages of the curvature span this part of the training, within bounds in steps.
AVERAGED_PART = 1 / 20
FEWEST_AVERAGED, MOST_AVERAGED = 20.0, 1000.0
# For data with little noise a part of the usual temperature; for noisy data that of the Bayes posterior
# (credo.training.plan).
COLDER = 0.1
WARM = 1.0
# Fewest epochs of a training that two short ones of other temperatures precede (credo.training.plan): in fewer than
# five epochs of their own they see nothing of the noise that a network learns later.
FEWEST_EPOCHS = 30
# A temperature that rises does so over this part of a training where the noise of the data is not feared: in few epochs
# little of it is learned, and short trainings have chosen the cold plan. Else it rises over the first half.
RISING_PART, USUAL_PART = 0.9, 0.5
# A long training begins with this part of the noise of a short one.
LEAST_NOISE = 0.25


def planned_temperature(task: str, epochs: float) -> float:
    """The temperature for a training of so many epochs.

    Args:
        task: That of the likelihood, "regression" or "classification".
        epochs: Times that every example is seen.
    """
    return TEMPERATURES.get(task, 1.0) * min(1.0, epochs / LONG_TRAINING)


def planned_noise(steps: int) -> float:
    """The first σ of a training as a part of that of a short one: less, if there is time for σ to grow back.

    Noise keeps the means from learning sharp functions at first. σ is learned in logarithms, at a rate of 1e-2 and half
    of it on average under the cosine schedule, so that it can grow by a factor of exp(steps/200).

    Args:
        steps: Steps of the training.
    """
    return max(LEAST_NOISE, math.exp(-steps / 200))


def planned_decay(steps: int, part: float = AVERAGED_PART) -> float:
    """The weight of the old value in a running average that spans a part of the training.

    Args:
        steps: Steps of the training.
        part: Part of them that an average spans.
    """
    return 1 - 1 / min(max(steps * part, FEWEST_AVERAGED), MOST_AVERAGED)


def checked_temperature(temperature: float) -> float:
    """The same; raises ValueError unless it is a number that is finite and not negative."""
    if not (is_number(temperature) and 0 <= temperature < float("inf")):
        raise ValueError(
            f"temperature={temperature!r:.80} must be one number, finite and not negative; 1 is the exact posterior."
        )
    return temperature
