"""TOML that we write is read back by the standard library as what went in; key=value on the command line."""

import math
import tomllib
from typing import Any

import pytest

from credo.experiments.toml import dump_toml, parse_assignment


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"a": 1},
        {"a": {}},
        {"a": {"b": {}, "c": {"d": {"e": 1}}}},
        {"top": True, "a": {"x": 1, "b": {"x": 2}, "c": {"y": {"z": 3}}}, "d": {"x": False}},
        {"numbers": {"small": 1e-7, "large": 1e300, "whole": 1e16, "minus": -0.0, "inf": math.inf, "-inf": -math.inf}},
        {"integers": {"zero": 0, "negative": -3, "big": 2**62}},
        {"lists": {"empty": [], "mixed": [1, 2.5, "a", True], "nested": [[1], [2, 3]], "tables": [{"k": "v"}, {}]}},
        {
            "text": {
                "quotes": "a \"b\" 'c'",
                "slash": "C:\\new\\table",
                "lines": "a\nb\tc\r",
                "empty": "",
                "hash": "# x",
            }
        },
        {"text": {"unicode": "ρ=−3 Größe 日本 😀", "control": "\x00\x1f\x7f", "toml": "]\n[x]\ny = 1"}},
        {
            "odd keys": {
                "with space": 1,
                "dot.ted": 2,
                "": 3,
                "ρ": 4,
                "😀": 5,
                'quo"te': 6,
                "1": 7,
                "a-b_c": 8,
                "\x7f": 9,
            }
        },
        {"dot.ted": {"in ner": {"x": 1}}},
    ],
)
def test_round_trip(tables: dict[str, Any]) -> None:
    again = tomllib.loads(dump_toml(tables))
    assert again == tables
    assert repr(again) == repr(tables)  # 1 is not 1.0 and True is not 1


def test_nan_stays_nan() -> None:
    assert math.isnan(tomllib.loads(dump_toml({"a": math.nan}))["a"])


def test_none_is_left_out() -> None:
    tables = {"a": None, "b": {"c": None, "d": 1, "e": {"f": None}}, "g": [{"h": None, "i": 2}]}
    assert tomllib.loads(dump_toml(tables)) == {"b": {"d": 1, "e": {}}, "g": [{"i": 2}]}


def test_none_in_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="None"):
        dump_toml({"a": [1, None]})


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("method.lr=0.01", ["method", "lr"], 0.01),
        ("training.epochs=3", ["training", "epochs"], 3),
        ("a=true", ["a"], True),
        ("a=1e-3", ["a"], 1e-3),
        ("model.hidden=[16, 8]", ["model", "hidden"], [16, 8]),
        ('method.prior={kind="laplace", b=0.1}', ["method", "prior"], {"kind": "laplace", "b": 0.1}),
        ("method.name=bbb", ["method", "name"], "bbb"),
        ("method.name='bbb'", ["method", "name"], "bbb"),
        ("method.name = mc-dropout ", ["method", "name"], "mc-dropout"),
        ("data.path=/a b/c=d.csv", ["data", "path"], "/a b/c=d.csv"),
        ("data.target=", ["data", "target"], ""),
        ("a.b.c=x", ["a", "b", "c"], "x"),
    ],
)
def test_assignments(text: str, path: list[str], value: Any) -> None:
    found = parse_assignment(text)
    assert found == (path, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize("text", ["", "method.lr", "=3", ".a=3", "a.=3", "a..b=3", " =1"])
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not key=value; write for instance method\.lr=0\.01"):
        parse_assignment(text)
