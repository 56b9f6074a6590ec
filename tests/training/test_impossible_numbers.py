"""Files whose numbers cannot be a posterior's, with a digest that fits: refused by the name of the tensor."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.prior import Gaussian
from credo.core.support.tensor_files import digest_of
from credo.training.files.checkpoint import load_checkpoint, save_checkpoint

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2


class Network(nn.Module):
    """With running statistics, and a mask of −inf as attention has it."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(x))) + self.mask
        return outputs


BUILDS: dict[str, Callable[[], credo.Posterior]] = {
    "map": lambda: credo.MAP(Network(), data_size=12),
    "bbb": lambda: credo.BBB(Network(), data_size=12, prior=Gaussian(0.0, {"*": 2.0})),
    "vogn": lambda: credo.VOGN(Network(), data_size=12),
    "ivon": lambda: credo.IVON(Network(), data_size=12),
    "noisy-kfac": lambda: credo.NoisyKFAC(Network(), data_size=12),
    "ensemble": lambda: credo.Ensemble([credo.BBB(Network(), data_size=12, seed=i) for i in range(2)]),
}
WRONG = [
    ("map", "model.first.weight", math.nan),
    ("map", "model.norm.running_mean", math.inf),
    ("map", "model.norm.running_var", -0.5),
    ("map", "model.mask", math.nan),
    ("bbb", "rho", math.inf),
    ("bbb", "prior.scale_vector", -1.0),
    ("vogn", "curvature", -1e-9),
    ("vogn", "momentum", math.nan),
    ("ivon", "curvature", -5.0),
    ("noisy-kfac", "_blocks.0.inputs", -1.0),
    ("noisy-kfac", "_blocks.1.output_root", -1.0),
    ("noisy-kfac", "_blocks.2.curvature", -1.0),
    ("ensemble", "members.1.model.last.bias", math.nan),
]


def trained(name: str) -> credo.Posterior:
    posterior = BUILDS[name]()
    for _ in range(2):
        posterior.step(lambda net: F.cross_entropy(net(X), Y))
    return posterior


def spoil(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.reshape(-1)[0] = value
    return changed


def forge(path: Path, tensor: str, value: float) -> None:
    with safe_open(path, framework="pt") as file:
        about = file.metadata()["credo"]
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    tensors[tensor] = spoil(tensors[tensor], value)
    save_file(tensors, path, metadata={"credo": about, "digest": digest_of(tensors, about)})


@pytest.mark.parametrize(("name", "tensor", "value"), WRONG)
def test_load_refuses_and_names_file_and_tensor(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    path = credo.save(trained(name), tmp_path / "p.safetensors")
    credo.load(path, model=Network())  # the mask's −inf is fine
    forge(path, tensor, value)
    wanted = r"variance of first\.weight" if name == "ivon" else tensor.replace(".", r"\.")
    with pytest.raises(credo.FileFormatError, match=rf"p\.safetensors holds no valid posterior: .*{wanted}"):
        credo.load(path, model=Network())


@pytest.mark.parametrize(("name", "tensor", "value"), WRONG)
def test_checkpoints_are_refused_alike(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    credo.fit(BUILDS[name](), [(X, Y)], epochs=2, checkpoint=path, progress=False)
    state: dict[str, Any] = load_checkpoint(path)
    state["posterior"][tensor] = spoil(state["posterior"][tensor], value)
    save_checkpoint(path, state)
    wanted = r"variance of first\.weight" if name == "ivon" else tensor.replace(".", r"\.")
    with pytest.raises(credo.FileFormatError, match=rf"checkpoint\.pt holds no valid state: .*{wanted}"):
        credo.fit(BUILDS[name](), [(X, Y)], epochs=3, checkpoint=path, progress=False)


def test_the_optimiser_in_a_checkpoint_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    credo.fit(BUILDS["map"](), [(X, Y)], epochs=2, checkpoint=path, progress=False)
    state: dict[str, Any] = load_checkpoint(path)
    moments = state["posterior"]["_extra_state"]["optimizer"]["state"][0]
    moments["exp_avg"] = spoil(moments["exp_avg"], math.nan)
    save_checkpoint(path, state)
    with pytest.raises(credo.FileFormatError, match=r"optimizer\.state\.0\.exp_avg holds NaN"):
        credo.fit(BUILDS["map"](), [(X, Y)], epochs=3, checkpoint=path, progress=False)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    posterior = trained("map")
    path = credo.save(posterior, tmp_path / "p.safetensors")
    before = path.read_bytes()
    with torch.no_grad():
        posterior.model.get_parameter("last.bias")[0] = torch.nan
    with pytest.raises(credo.NonFiniteError, match=r"Not saved, .*: model\.last\.bias holds NaN or infinite values"):
        credo.save(posterior, path)
    assert path.read_bytes() == before
