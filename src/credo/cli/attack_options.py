"""Options of `credo attack`: which belong to which attack, their defaults, and file names derived from them."""

from __future__ import annotations

from typing import Any

from credo.attacks import THREATS
from credo.attacks.minimal import RUNNER_UP
from credo.core.errors import unknown

# Options of each attack with their defaults.
ATTACKS: dict[str, dict[str, Any]] = {
    "fgsm": {"epsilon": 0.1, "norm": "linf"},
    "minimal": {"confidence": 1e-3, "steps": 200},
    "pgd": {"epsilon": 0.1, "norm": "linf", "steps": 40, "restarts": 1},
}
ANY = "any"
DRAWS = 10
_WHY = {
    "epsilon": "it finds the smallest change of any length",
    "norm": "it always uses l2",
    "steps": "it takes one step",
    "confidence": "it goes as far as --epsilon allows",
    "restarts": "only pgd has random starts",
}


def attack_options(attack: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options of an attack with its defaults filled in; raises ValueError if one does not apply. None: not given."""
    if attack not in ATTACKS:
        raise ValueError(unknown("attack", attack, ATTACKS))
    defaults = ATTACKS[attack]
    chosen = {key: value for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if key not in defaults:
            owners = " and ".join(name for name in ATTACKS if key in ATTACKS[name])
            raise ValueError(
                f"--{key} {value} is an option of {owners} and has no effect on {attack}: {_WHY[key]}. Omit it."
            )
    # Files of earlier versions do not record a single start.
    return {key: value for key, value in {**defaults, **chosen}.items() if (key, value) != ("restarts", 1)}


def draws_of(threat: str, draws: int | None) -> int:
    """Networks that the attacker evaluates at each step."""
    if threat != "one":
        return DRAWS if draws is None else draws
    if draws is not None:
        others = ", ".join(name for name in THREATS if name != "one")
        raise ValueError(
            f"--draws {draws} is an option of the threats {others} and has no effect on one, which knows a single "
            "network. Omit it."
        )
    return 1


def target_of(attack: str, target: str | None, classes: int) -> int | str | None:
    """The target of an attack: a class, "any", or None for the attack's default.

    Args:
        attack: Name of the attack.
        target: The option as given.
        classes: Number of classes.
    """
    if target is None or target == (RUNNER_UP if attack == "minimal" else ANY):
        return None
    if target == ANY:
        return ANY
    if target == RUNNER_UP:
        raise ValueError(
            f"--target {target}: only minimal can target the second most probable class. Omit it for any other class, "
            "or give the number of one."
        )
    if not target.isdecimal() or int(target) >= classes:
        raise ValueError(
            f"--target {target}: give a class from 0 to {classes - 1}, {ANY} for any other class, or with minimal "
            f"{RUNNER_UP} for the second most probable one."
        )
    return int(target)


def file_name(settings: dict[str, Any], count: int | None, seed: int) -> str:
    """File name from all options that differ from their defaults, so that different attacks have different files.

    Args:
        settings: Attack, options, threat, draws and target.
        count: Number of inputs; None for all.
        seed: Seed of the attack.
    """
    attack, options, threat = settings["attack"], settings["options"], settings["threat"]
    parts = [attack, *((options["norm"], f"{options['epsilon']:g}") if "norm" in options else ())]
    defaults = {key: value for key, value in ATTACKS[attack].items() if key not in ("norm", "epsilon")}
    chosen = {key: value for key, value in options.items() if key in defaults and value != defaults[key]}
    chosen |= {"target": settings["target"]} if "target" in settings else {}
    chosen |= {} if settings["draws"] == draws_of(threat, None) else {"draws": settings["draws"]}
    chosen |= {} if count is None else {"first": count}
    chosen |= {"seed": seed} if seed else {}
    if threat != default_threat(attack):
        parts.append(threat)
    shown = (f"{key}{value if isinstance(value, str) else format(value, 'g')}" for key, value in chosen.items())
    return "-".join([*parts, *shown]) + ".safetensors"


def default_threat(attack: str) -> str:
    """Default threat model of an attack."""
    # With fresh draws at every step, the smallest change would only be that of the luckiest draw.
    return "fixed" if attack == "minimal" else "fresh"
