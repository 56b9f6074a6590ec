"""The published table of what works with what is what happens now."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.contract.support import COSTS, KINDS, TARGETS, TRAITS, costs, takes, trains_and_predicts, traits

import credo

TABLES = json.loads((Path(__file__).parents[2] / "results" / "support" / "table.json").read_text(encoding="utf-8"))[
    "tables"
]


def published(key: str, method: str) -> dict[str, Any]:
    row = next((row for row in TABLES[key]["rows"] if row[0] == f"`{method}`"), None)
    assert row, (
        f"results/support/table.json has no row for {method}: run `python docs/make_results.py`, and commit what it "
        "writes there and in docs/support.md"
    )
    return dict(zip(TABLES[key]["columns"][1:], row[1:], strict=True))


def test_a_method_without_a_row_says_what_to_run() -> None:
    with pytest.raises(AssertionError, match=r"no row for yours: run `python docs/make_results\.py`"):
        published("targets", "yours")


@pytest.mark.part(25)
@pytest.mark.parametrize(("method", "target"), [(name, one) for name in credo.METHODS for one in TARGETS])
def test_a_method_takes_the_targets_that_the_table_says(method: str, target: str) -> None:
    assert trains_and_predicts(method, target) == published("targets", method)[target]


@pytest.mark.part(20)
@pytest.mark.parametrize(("method", "network"), [(name, one) for name in credo.METHODS for one in KINDS])
def test_a_method_takes_the_networks_that_the_table_says(method: str, network: str) -> None:
    assert takes(method, network) == published("networks", method)[network]


@pytest.mark.parametrize("method", credo.METHODS)
def test_traits_and_costs_are_those_of_the_classes_and_records(method: str) -> None:
    assert list(published("traits", method).items()) == list(zip(TRAITS, traits(method), strict=True))
    assert list(published("costs", method).items()) == list(zip(COSTS, costs(method), strict=True))
