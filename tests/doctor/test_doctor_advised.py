"""The doctor's arguments as commands take them."""

import pytest

from credo.experiments.advice_options import setting_of
from credo.experiments.config import make_experiment


@pytest.mark.parametrize(
    ("name", "argument", "wanted"),
    [
        ("noise-too-large", "std_init=0.05", "method.std_init=0.05"),
        ("gradient-noise", "noise='lrt'", "method.noise=lrt"),
        ("gradient-noise", "draws=4", "method.draws=4"),
        ("few-draws", "draws=64", "--draws 64"),
        ("still-falling", "epochs=80", "training.epochs=80"),
        ("no-twin", "twin=map_posterior", "--twin runs/plain"),
        ("not-finite", "clip_norm=1", "method.clip_norm=1"),
        ("stale-statistics", "credo.refresh_statistics(posterior, loader)", None),
        ("x", None, None),
    ],
)
def test_settings(name: str, argument: str | None, wanted: str | None) -> None:
    assert setting_of(name, argument, {"name": "bbb"}) == (wanted or argument)


def test_an_ensemble_keeps_its_members_options_apart() -> None:
    method = {"name": "ensemble", "of": {"name": "bbb"}}
    assert setting_of("worse-than-twin", "temperature=0.1", method) == "method.of.temperature=0.1"
    assert setting_of("still-falling", "epochs=8", method) == "training.epochs=8"


def test_a_likelihood_becomes_a_table_that_an_experiment_takes() -> None:
    found = setting_of("noise-level", "likelihood=credo.GaussianNoise(std=0.3, learn=True)", {"name": "bbb"})
    keys = dict(part.split("=") for part in (found or "").split())
    prefix = "method.likelihood."
    assert keys == {f"{prefix}kind": "gaussian", f"{prefix}std": "0.3", f"{prefix}learn": "true"}
    table = {"kind": "gaussian", "std": 0.3, "learn": True}
    make_experiment({"data": {"name": "gap"}, "method": {"name": "bbb", "likelihood": table}})
