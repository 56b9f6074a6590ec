"""`--help` explains options whose values are words or have a unit."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from credo.attacks import NORMS, THREATS
from credo.compress.prune import STRUCTURES
from credo.compress.ranking import SCOPES
from credo.continual import CARRIES
from credo.experiments.continual import KINDS, Continual

Call = Callable[..., Any]


def helped(call: Call, command: str) -> str:
    """The help as one line, without frames."""
    return re.sub(r"[│•\s]+", " ", call(command, "--help").stdout)


def test_attackers_are_explained(call: Call) -> None:
    text = helped(call, "attack")
    for name, meaning in THREATS.items():
        assert f"{name}: {meaning}".replace("`", "") in text


def test_the_unit_of_epsilon_is_stated(call: Call) -> None:
    text = helped(call, "attack")
    assert all(f"with {norm}" in text for norm in NORMS)
    assert "Images run from 0 to 1" in text
    assert "in the units of their data" in text


@pytest.mark.parametrize("name", [*SCOPES, *STRUCTURES])
def test_ways_to_prune_are_explained(call: Call, name: str) -> None:
    assert re.search(rf"\b{name}: \w+", helped(call, "prune"))


def test_every_key_of_continual_is_explained(call: Call) -> None:
    text = helped(call, "continual").partition("continual with these keys:")[2].partition("The table has")[0]
    assert text
    for key in (field.name for field in fields(Continual)):
        assert re.search(rf"\b{key}(: |, joint: | multiplies )", text), key
    assert all(f"{kind} (" in text for kind in (*KINDS, *CARRIES))
