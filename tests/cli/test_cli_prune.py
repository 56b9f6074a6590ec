"""Options of `credo prune` that exclude each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", 0.5), "--rate has no effect"),
        (("--out", "pruned"), "--out has no effect"),
        (("--compact",), "--compact has no effect"),
        (("--rate", 0.5, "--out", "pruned", "--compact"), "--rate and --compact and --out have no effect"),
        (("--threshold", 0.1), "give one of them"),
    ],
)
def test_a_sweep_takes_nothing_that_is_about_one_pruned_run(
    refused: Refused, digits_run: Path, options: tuple[Any, ...], message: str
) -> None:
    before = sorted(digits_run.iterdir())
    assert message in refused("prune", digits_run, "--sweep", "0,0.5", *options)
    assert sorted(digits_run.iterdir()) == before
    assert not Path("pruned").exists()
