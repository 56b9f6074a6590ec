"""Adversarial attacks on the inputs of networks and posteriors, and checks of their results."""

from credo.attacks.balls import NORMS
from credo.attacks.common import AttackResult
from credo.attacks.gradient import fgsm, pgd
from credo.attacks.masking import MaskingReport, check_masking
from credo.attacks.minimal import minimal
from credo.attacks.posterior import THREATS, posterior_logits, success_rate
from credo.attacks.search import random_search
from credo.attacks.sets import AttackSet, load_attack_set, make_attack_set

__all__ = [
    "NORMS",
    "THREATS",
    "AttackResult",
    "AttackSet",
    "MaskingReport",
    "check_masking",
    "fgsm",
    "load_attack_set",
    "make_attack_set",
    "minimal",
    "pgd",
    "posterior_logits",
    "random_search",
    "success_rate",
]
