"""From measurements to findings: all rules in the order of importance."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from credo.doctor.findings import Finding, in_order
from credo.doctor.measurements import Facts
from credo.doctor.rules import learning as rules_learning
from credo.doctor.rules import prediction as rules_prediction
from credo.doctor.rules import training as rules_training

Rule = Callable[[Facts], Iterator[Finding]]

# What was done wrong, in the order in which one thing causes another: a wrong data_size also shows as a collapse.
CAUSES: tuple[Rule, ...] = (
    rules_training.data_size,
    rules_training.temperature,
    rules_training.stale_statistics,
    rules_training.noise_too_large,
    rules_learning.noisy_start,
    rules_training.no_uncertainty,
    rules_prediction.noise_level,
)
# What may have several causes: not listed where an alarm explains it, since its advice would be premature.
CONSEQUENCES: tuple[Rule, ...] = (
    rules_training.collapsed,
    rules_learning.not_learned,
    rules_prediction.worse_than_twin,
    rules_learning.unfinished,
    rules_learning.still_falling,
    rules_prediction.worse_than_mean,
    rules_prediction.dispersion,
    rules_training.gradient_noise,
    rules_prediction.draws,
)


def judge(facts: Facts) -> tuple[Finding, ...]:
    """All findings, the most important first."""
    found: list[Finding] = []
    for rule in CAUSES:
        found += rule(facts)
    found = [*rules_prediction.worse_than_constant(facts, found), *found]
    for rule in CONSEQUENCES:
        if not any(finding.severity == "alarm" for finding in found):
            found += rule(facts)
    return in_order([*found, *rules_prediction.missing(facts)])
