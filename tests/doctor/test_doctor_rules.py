"""The rules together, on measurements made by hand; and the limits as the documentation states them."""

import re
from pathlib import Path

import pytest
from doctor_measurements import HEALTHY, changed, interval, named, poor, statistics, worse

from credo.doctor import thresholds as limits
from credo.doctor.advice import suggested_std
from credo.doctor.run_rules import run_rules


def test_nothing_is_found_in_a_healthy_one() -> None:
    assert run_rules(HEALTHY) == ()


def test_consequences_are_not_listed_beside_an_alarm() -> None:
    several = {
        "scores": {"ensemble_over_mean": worse(1.0), **poor(0.3)},
        "dispersion": {"surprise": interval(3.0), "excess": interval(1.0)},
    }
    assert [f.name for f in run_rules(changed(counts={"data_size": 10}, **several))] == ["data-size"]
    assert len(run_rules(changed(**several))) == 1  # not-learned, itself an alarm
    both = changed(counts={"data_size": 10}, statistics=statistics(1.0, 1.0, 0.95))
    assert [f.name for f in run_rules(both)] == ["data-size", "stale-statistics"]


def test_no_argument_that_the_method_does_not_take() -> None:
    bare = {"arguments": frozenset({"lr"})}
    hot = changed(method=bare, objective={"temperature": 100.0})
    finding = named(hot, "prior-too-strong")
    assert finding is not None
    assert finding.argument is None
    dropout = changed(method={"arguments": frozenset({"rate"}), "rate": 0.2}, scores={"ensemble_over_mean": worse(1.0)})
    finding = named(dropout, "worse-than-mean")
    assert finding is not None
    assert finding.argument == "rate=0.1"


def test_the_wanted_std_balances() -> None:
    """σ = 0.05 = 0.2·s, 1,000 weights: 800·q = 1000·(1 − 0.04·q) at q = 1.19, σ = 0.0546; half the means is 0.05."""
    assert suggested_std(HEALTHY) == pytest.approx(0.05)
    roomy = changed(weights={"snr": 10.0})
    assert suggested_std(roomy) == pytest.approx(0.05)  # 0.0546 to one digit
    costly = changed(weights={"snr": 10.0}, objective={"noise_cost": 80_000.0})
    assert suggested_std(costly) == pytest.approx(0.006)  # 0.05·√(1000/80040) = 0.0056
    free = changed(weights={"snr": 100.0}, objective={"noise_cost": 0.0})
    assert suggested_std(free) == pytest.approx(0.2)  # the prior's 0.25 to one digit
    assert suggested_std(changed(weights={"snr": 0.4})) == pytest.approx(0.01)  # half the means


def test_the_documentation_states_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", page, flags=re.MULTILINE))
    actual = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert set(stated) == set(actual)
    for name, value in actual.items():
        numbers = [float(number) for number in re.findall(r"[\d.]+", stated[name])]
        assert numbers == list(value if isinstance(value, tuple) else (value,)), name
