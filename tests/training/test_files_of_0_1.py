"""Files and checkpoints that Credo 0.1 wrote still load, predict and train on as they did there."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.posterior import Posterior
from credo.training.files.checkpoint import load_checkpoint

SAVED = Path(__file__).parents[1] / "fixtures" / "saved_by_0_1"
EXPECTED = json.loads((SAVED / "expected.json").read_text())


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, generator=generator)
    return inputs, torch.randint(0, 2, (8,), generator=generator), torch.randn(8, 2, generator=generator)


def loaded(name: str) -> Posterior:
    with torch.random.fork_rng():
        return credo.load(SAVED / f"{name}.safetensors", model=network())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_saved_posterior_predicts_as_it_did(name: str) -> None:
    prediction = credo.predict(loaded(name), batch()[0], draws=4, seed=3)
    values = prediction.mean if isinstance(prediction, credo.RegressionPrediction) else prediction.probs
    torch.testing.assert_close(values, torch.tensor(EXPECTED[name]["values"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_goes_on_with_the_same_step(name: str) -> None:
    posterior = loaded(name)
    posterior.load_state_dict(load_checkpoint(SAVED / f"{name}.pt")["posterior"])
    inputs, labels, values = batch()
    target = values if name == "regression" else labels
    terms = posterior.step(lambda net: posterior.likelihood.nll(net(inputs), target))
    assert terms.loss == pytest.approx(EXPECTED[name]["next_loss"], rel=1e-4)


# Where 0.1 had the arguments that are fields of a group now.
OLD_NAMES = {
    "kl_term": {"estimator": "kl", "weight": "kl_weight", "batches": "batches", "warmup_steps": "warmup_steps"},
    "momentum": {"decay": "momentum", "correction": "momentum_correction"},
    "curvature": {"decay": "curvature_decay", "init": "curvature_init"},
    "optimizer": {"name": "optimizer"},
    "init": {"std": "std_init"},
    "temperature": {"to": "temperature", "start": "temperature_start", "steps": "warmup_steps"},
}
# Gone without a trace: both had no effect at these values.
WITHOUT_EFFECT = {"augmentation": 1.0, "paper_tau": False}


def as_in_0_1(options: dict[str, object]) -> dict[str, object]:
    """The options flat, under the names of 0.1, without those that are empty."""
    flat: dict[str, object] = {}
    for name, value in options.items():
        old = OLD_NAMES.get(name, {})
        is_group = name in (*OLD_NAMES, "nodes") and isinstance(value, dict)
        flat |= {old.get(field, field): entry for field, entry in value.items()} if is_group else {name: value}
    return given(flat)


def given(options: dict[str, object]) -> dict[str, object]:
    empty = {name for name, value in options.items() if value is None or value in ({}, 0) or value == []}
    return {name: value for name, value in options.items() if name not in empty and name not in WITHOUT_EFFECT}


@pytest.mark.parametrize("name", EXPECTED)
def test_constructor_arguments_come_back(name: str) -> None:
    options = dict(EXPECTED[name]["config"])
    if "prior_std" in options:
        options["prior"] = options.pop("prior_std")
    assert all(options.get(key, value) == value for key, value in WITHOUT_EFFECT.items())
    found = as_in_0_1(loaded(name).config())
    assert found.pop("update", "natural") == "natural"  # 0.1 had no other
    assert found == given(options)


@pytest.mark.parametrize("name", EXPECTED)
def test_files_need_no_old_name(name: str, recwarn: pytest.WarningsRecorder) -> None:
    loaded(name)
    assert not [warning for warning in recwarn if warning.category is DeprecationWarning]
