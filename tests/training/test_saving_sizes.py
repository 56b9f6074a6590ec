"""Small files that describe much, and what is no file at all: an error, at no cost."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_files import forge
from safetensors import safe_open
from safetensors.torch import save_file

import credo
from credo.core.support.tensor_files import digest_of
from credo.models import build_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    network = build_model("mlp", inputs=(3,), classes=2, hidden=(4,), seed=0)
    return credo.save(credo.BBB(network, data_size=10), tmp_path / "p.safetensors")


# The description is small, what it describes is not: each would cost more memory or time than there is.
BOMBS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "wide layers": lambda about: about["architecture"]["spec"]["options"].update(hidden=[10**8, 10**8]),
    "wide layers, also in the shapes": lambda about: (
        about["architecture"]["spec"]["options"].update(hidden=[10**12]),
        about["architecture"]["shapes"].update({"linear1.weight": [10**12, 3]}),
    ),
    "wide layers made compact": lambda about: (
        about["architecture"]["spec"]["options"].update(hidden=[10**8, 10**8]),
        about["architecture"].update(compact=True),
    ),
    "many layers": lambda about: about["architecture"].update(
        spec={"name": "resnet-cifar", "options": {"depth": 6 * 10**4 + 2}}
    ),
    "a long prior": lambda about: about["posterior"]["options"].update(prior={"std": {"entries": 10**15}}),
    "many members": lambda about: about["posterior"].update(members=[about["posterior"].copy()] * 300),
    "many components": lambda about: about["posterior"].update(method="node-bnn", options={"components": 10**14}),
    "other kinds of numbers": lambda about: about["architecture"]["dtypes"].update(
        dict.fromkeys(about["architecture"]["dtypes"], "int8")
    ),
    "a negative length": lambda about: about["posterior"]["options"].update(prior={"mean": {"entries": -1}}),
    "an endless seed": lambda about: about["posterior"]["options"].update(seed=float("inf")),
    "a seed in letters": lambda about: about["posterior"]["options"].update(seed="x"),
    "shapes of the wrong kind": lambda about: about["architecture"].update(shapes={"linear1.weight": "ab"}),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_descriptions_of_more_than_the_file_holds(bomb: str, path: Path) -> None:
    forge(path, lambda about: BOMBS[bomb](about) and None)
    with pytest.raises(credo.FileFormatError, match=r"p\.safetensors"):
        credo.load(path)


def test_a_description_nested_deep(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    text = '{"format": 1, "extra": ' + "[" * 100_000 + "]" * 100_000 + "}"
    save_file(tensors, path, metadata={"credo": text, "digest": digest_of(tensors, text)})
    for read in (credo.load, credo.describe):
        with pytest.raises(credo.FileFormatError, match=r"p\.safetensors has a damaged description"):
            read(path)


@pytest.mark.parametrize("name", ["pipe", "folder"])
def test_what_is_no_regular_file_is_not_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for read in (credo.load, credo.describe):
        with pytest.raises(credo.FileFormatError, match=f"{name} is a {name}, not a regular file"):
            read(tmp_path / name)


def test_a_change_that_is_not_possible_is_not_blamed_on_the_file(path: Path) -> None:
    with pytest.raises(ValueError, match=r"^draws=0 must be"):
        credo.load(path, draws=0)


def test_a_compact_network_of_a_wide_one_is_loaded(path: Path) -> None:
    """Its file says how wide the network was that it is made of; that one is never built."""
    posterior = credo.load(path)
    wide = {"hidden": [10**8]}
    forge(path, lambda about: about["architecture"]["spec"]["options"].update(wide))
    forge(path, lambda about: about["architecture"].update(compact=True))
    loaded = credo.load(path)
    for name, tensor in posterior.state_dict().items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(loaded.state_dict()[name], tensor)
    assert loaded.model.credo_spec["options"]["seed"] == 0
    assert loaded.model(torch.ones(1, 3)).shape == (1, 2)
