"""A network of the user's own from the command line: built, trained, loaded; its code runs only when it is typed."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import credo
from credo.models import build_model, use_own_model
from credo.models.own import OWN

Call = Callable[..., Any]
Refused = Callable[..., str]

FILE = """
from pathlib import Path

from torch import nn

from parts import SIZE

Path(__file__).with_name("imported").touch()

def build(inputs, classes, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs[0] * inputs[1] * inputs[2], width * SIZE), nn.ReLU(),
                         nn.Linear(width * SIZE, classes))

class Fixed(nn.Module):
    def __init__(self, activation=nn.Tanh):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), activation(), nn.Linear(8, 10))

    def forward(self, x):
        return self.layers(x)

def nothing():
    return 3

answer = 42
"""
QUICK = ("training.epochs=1", "training.batch_size=256", "training.examples=300", "--draws", 2)


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    OWN.clear()
    yield
    OWN.clear()


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "networks.py").write_text(FILE)
    (folder / "parts.py").write_text("SIZE = 2\n")
    return folder / "networks.py"


@pytest.fixture
def own_run(call: Call, networks: Path, tmp_path: Path) -> Path:
    """A run with that network; afterwards its code counts as not imported, as in a new process."""
    call("train", f"model.name={networks}:build", "model.width=4", *QUICK, "--run", tmp_path / "own")
    OWN.clear()
    networks.with_name("imported").unlink()
    return tmp_path / "own"


def test_a_function_gets_its_options_and_the_shapes(call: Call, networks: Path) -> None:
    result = json.loads(call("train", f"model.name={networks}:build", "model.width=4", *QUICK, "--json").stdout)
    state = credo.describe("runs/digits-networks.py-build-bbb/model.safetensors")["architecture"]["shapes"]
    assert list(state.values()) == [[8, 64], [8], [10, 8], [10]]
    assert result["experiment"]["model"] == {"name": f"{networks}:build", "width": 4}


def test_a_class_without_these_arguments_is_seeded(networks: Path) -> None:
    use_own_model(f"{networks}:Fixed")
    before = torch.get_rng_state()
    one, two, other = (build_model(f"{networks}:Fixed", inputs=[1, 8, 8], classes=10, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [net.state_dict()["layers.1.weight"] for net in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_class_of_an_installed_package(call: Call) -> None:
    settings = ("model.name=torch.nn:Linear", "model.in_features=2", "model.out_features=2", "data.name=moons")
    call("train", *settings, *QUICK[:2], "--run", "run")
    result = json.loads(call("evaluate", "run", "--model", "torch.nn:Linear", "--draws", 2, "--json").stdout)
    assert 0 <= result["accuracy"] <= 1


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("{file}:absent", "", "has no class or function 'absent'; it has"),
        ("{file}:answer", "", "has no class or function 'answer'"),
        ("{file}:build", "model.widht=3", "did you mean 'width'?"),
        ("{file}:build", "model.width=a", "model.width='a' must be a whole number"),
        ("{file}:nothing", "", "returned int; it must return the network"),
        ("{file}x.py:build", "", "There is no file"),
        ("no_such_package.networks:Net", "", "or the path of a file, such as networks.py:Net"),
        ("{file}:", "", "write file.py:function or package.module:Class"),
        ("nett", "", "Your own networks are file.py:function or package.module:Class"),
    ],
)
def test_mistakes(refused: Refused, networks: Path, name: str, setting: str, message: str) -> None:
    settings = [f"model.name={name.format(file=networks)}", *([setting] if setting else [])]
    assert message.lower() in refused("train", *settings, "--run", "run").lower()
    assert not Path("run").exists()


def test_a_file_that_fails_is_named(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert "broken.py cannot be imported: ZeroDivisionError" in refused("train", "model.name=broken.py:Net")


COMMANDS = [
    ("evaluate", "{run}"),
    ("predict", "{run}", "inputs.npy"),
    ("calibrate", "{run}"),
    ("prune", "{run}", "--rate", "0.5"),
    ("attack", "{run}", "--count", "5"),
    ("doctor", "{run}"),
    ("report", "{run}"),
    ("summary", "{run}"),
    ("export", "{run}", "model.pt2"),
    ("train", "{run}/config.toml", "--run", "{run}"),
    ("train", "model.weights={run}", "--run", "other"),
    ("continual", "{run}/config.toml"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_no_command_runs_code_that_a_run_names(call: Call, own_run: Path, networks: Path, command: Any) -> None:
    import numpy as np

    np.save("inputs.npy", np.zeros((2, 1, 8, 8), np.float32))
    result = call(*(word.format(run=own_run) for word in command), code=2)
    wanted = "model.name=" if command[0] in ("train", "continual") and "weights" not in command[1] else "--model "
    if command[0] != "continual":
        assert f"{wanted}{networks}:build" in result.stderr
    assert not networks.with_name("imported").exists()


def test_loading_in_python_runs_no_code_either(own_run: Path, networks: Path) -> None:
    with pytest.raises(credo.core.errors.FileFormatError, match="pass model=, a new instance of it"):
        credo.load(own_run / "model.safetensors")
    assert not networks.with_name("imported").exists()
    use_own_model(f"{networks}:build")
    assert isinstance(credo.load(own_run / "model.safetensors"), credo.BBB)


def test_it_runs_if_it_is_typed_also_from_another_place(call: Call, own_run: Path, networks: Path) -> None:
    before = json.loads((own_run / "result.json").read_text())["test"]["nll"]
    shutil.move(networks.parent, "elsewhere")
    option = ("--model", "elsewhere/networks.py:build")
    found = json.loads(call("evaluate", own_run, *option, "--draws", 2, "--json").stdout)
    assert found["nll"] == pytest.approx(before, rel=1e-6)
    assert "Sequential" not in call("summary", own_run, *option).stderr
    call("prune", own_run, *option, "--rate", "0.5", "--structure", "units", "--compact", "--out", "small")
    call("evaluate", "small", *option, "--draws", 2)


def test_a_run_resumes_with_its_network(call: Call, own_run: Path, networks: Path) -> None:
    settings = (f"model.name={networks}:build", "model.width=4", "training.epochs=2", *QUICK[1:])
    result = json.loads(call("train", *settings, "--run", own_run, "--json").stdout)
    assert result["epochs"] == 2


def test_the_option_is_for_networks_of_your_own(refused: Refused, digits_run: Path, networks: Path) -> None:
    message = refused("evaluate", digits_run, "--model", f"{networks}:build")
    assert "Credo's own mlp. Omit --model" in message
    assert not networks.with_name("imported").exists()
