"""Commands that moved out of the package print where they went."""

from collections.abc import Callable
from typing import Any

import pytest

Call = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("reproduce",), "python -m reproductions"),
        (("reproduce", "--help"), "python -m reproductions --help"),
        (
            ("reproduce", "vogn", "--rows", "lenet5-vogn", "--json"),
            "python -m reproductions vogn --rows lenet5-vogn --json",
        ),
        (("figure", "boundary", "--out", "a b.png"), "python -m reproductions figure boundary --out 'a b.png'"),
    ],
)
def test_the_new_command_is_printed(call: Call, arguments: tuple[str, ...], line: str) -> None:
    result = call(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f"run: {line}\n")


def test_moved_commands_are_not_in_the_help(call: Call) -> None:
    shown = call("--help").stdout
    assert "reproduce" not in shown
    assert " figure " not in shown
