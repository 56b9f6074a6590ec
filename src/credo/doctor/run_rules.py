"""Apply all rules to the measurements, in order of importance."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from credo.doctor.findings import Finding, in_order
from credo.doctor.measurements import Measurements
from credo.doctor.rules import learning, prediction, sampling, training

Rule = Callable[[Measurements], Iterator[Finding]]

# Causes, in the order in which one leads to another: a wrong data_size also shows as a collapse.
CAUSES: tuple[Rule, ...] = (
    training.data_size,
    training.temperature,
    sampling.chains,
    training.unscaled_inputs,
    training.unscaled_targets,
    training.stale_statistics,
    training.noise_too_large,
    learning.noisy_start,
    training.no_uncertainty,
    prediction.noise_level,
)
# Symptoms that may have several causes: left out once an alarm explains them, since their advice would be premature.
CONSEQUENCES: tuple[Rule, ...] = (
    training.collapsed,
    learning.not_learned,
    prediction.worse_than_baseline,
    learning.unfinished,
    learning.still_falling,
    prediction.prior_disagreement,
    prediction.worse_than_mean,
    prediction.dispersion,
    training.gradient_noise,
    prediction.draws,
    prediction.feature_scores,
    prediction.far_inputs,
)


def run_rules(measured: Measurements) -> tuple[Finding, ...]:
    """All findings, the most important first."""
    found: list[Finding] = []
    for rule in CAUSES:
        found += rule(measured)
    found = [*prediction.worse_than_constant(measured, found), *found]
    for rule in CONSEQUENCES:
        if not any(finding.severity == "alarm" for finding in found):
            found += rule(measured)
    return in_order([*found, *prediction.missing(measured)])
