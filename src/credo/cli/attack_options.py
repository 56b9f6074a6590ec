"""What `credo attack` can be told: which option belongs to which attack, and the name of a file by them."""

from __future__ import annotations

from typing import Any

from credo.attacks import THREATS
from credo.attacks.minimal import RUNNER_UP
from credo.core.errors import unknown

# Options of each attack, with what they are by default.
ATTACKS: dict[str, dict[str, Any]] = {
    "fgsm": {"epsilon": 0.1, "norm": "linf"},
    "minimal": {"confidence": 1e-3, "steps": 200},
    "pgd": {"epsilon": 0.1, "norm": "linf", "steps": 40, "restarts": 1},
}
ANY = "any"
DRAWS = 10
_WHY = {
    "epsilon": "it looks for the smallest change, however long",
    "norm": "it always measures changes by l2",
    "steps": "it takes one step",
    "confidence": "it goes as far as --epsilon allows",
    "restarts": "only pgd begins at random places",
}


def attack_options(attack: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of an attack; one that it does not have is refused. None stands for what is not given."""
    if attack not in ATTACKS:
        raise ValueError(unknown("attack", attack, ATTACKS))
    usual = ATTACKS[attack]
    asked = {key: value for key, value in given.items() if value is not None}
    for key, value in asked.items():
        if key not in usual:
            owners = " and ".join(name for name in ATTACKS if key in ATTACKS[name])
            raise ValueError(
                f"--{key} {value}: an option of {owners}. It has no meaning for {attack}: {_WHY[key]}. Leave it out."
            )
    chosen = {**usual, **asked}
    # Files of earlier versions do not say how often one begins if it is once.
    return {key: value for key, value in chosen.items() if (key, value) != ("restarts", 1)}


def draws_of(threat: str, draws: int | None) -> int:
    """Networks that an attacker looks at in each step."""
    if threat != "one":
        return DRAWS if draws is None else draws
    if draws is not None:
        others = ", ".join(name for name in THREATS if name != "one")
        raise ValueError(
            f"--draws {draws}: an option of the threats {others}. It has no meaning for one, which knows a single "
            "network. Leave it out."
        )
    return 1


def target_of(attack: str, target: str | None, classes: int) -> int | str | None:
    """A class, "any" where that is not what the attack does anyway, or None for what it does anyway."""
    if target is None or target == (RUNNER_UP if attack == "minimal" else ANY):
        return None
    if target == ANY:
        return ANY
    if target == RUNNER_UP:
        raise ValueError(
            f"--target {target}: only minimal heads for the second most probable class. Leave it out for any other "
            "class, or give the number of one."
        )
    if not target.isdecimal() or int(target) >= classes:
        raise ValueError(
            f"--target {target}: the classes are 0 to {classes - 1}; {ANY} stands for any other one, and for minimal "
            f"{RUNNER_UP} for the second most probable one."
        )
    return int(target)


def file_name(settings: dict[str, Any], count: int | None, seed: int) -> str:
    """A name by all that is not as by default, so that other options never meet the file of these."""
    attack, options, threat = settings["attack"], settings["options"], settings["threat"]
    parts = [attack, *((options["norm"], f"{options['epsilon']:g}") if "norm" in options else ())]
    usual = {key: value for key, value in ATTACKS[attack].items() if key not in ("norm", "epsilon")}
    chosen = {key: value for key, value in options.items() if key in usual and value != usual[key]}
    chosen |= {"target": settings["target"]} if "target" in settings else {}
    chosen |= {} if settings["draws"] == draws_of(threat, None) else {"draws": settings["draws"]}
    chosen |= {} if count is None else {"first": count}
    chosen |= {"seed": seed} if seed else {}
    if threat != usual_threat(attack):
        parts.append(threat)
    shown = (f"{key}{value if isinstance(value, str) else format(value, 'g')}" for key, value in chosen.items())
    return "-".join([*parts, *shown]) + ".safetensors"


def usual_threat(attack: str) -> str:
    """What the attacker knows if nothing is said."""
    # Where the answer changes from look to look, there is no smallest change: it would be the luckiest look's.
    return "fixed" if attack == "minimal" else "fresh"
