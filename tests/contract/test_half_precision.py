"""Networks in bfloat16: momentum and curvature are single precision, or small changes of them would be lost."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.methods import IVON, OGN, VOGN

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vogn": (VOGN, {"curvature": {"init": 1.0}}),
    "vogn by name": (VOGN, {"curvature": {"init": 1.0}, "draws": 2, "prior_precision": {"*bias": 0.3, "*": 2.0}}),
    "ogn": (OGN, {}),
    "ivon": (IVON, {"curvature": 0.999}),
    "ivon squares": (IVON, {"curvature": {"decay": 0.999, "estimator": "squares"}, "draws": 2, "random": "all"}),
}


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CREDO_KERNELS", "1" if request.param == "compiled" else "0")
    return request.param


@pytest.fixture(params=METHODS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def make(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    method, fixed = METHODS[name]
    return method(network(dtype), data_size=200, **{"lr": 0.05, **fixed, **options})


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 4, generator=generator)
    return x.to(dtype), (x[:, :3] + 0.1).argmax(1)


def run(posterior: Any, steps: int, scale: float = 1.0) -> list[credo.Terms]:
    x, y = batch(next(posterior.model.parameters()).dtype)
    return [posterior.step(lambda net: scale * F.cross_entropy(net(x).float(), y)) for _ in range(steps)]


@pytest.mark.part(2)
def test_the_curvature_moves_as_in_single_precision(name: str) -> None:
    """A large one forgets itself by 0.999 a step: rounded to 8 bits, 0.999·s is s."""
    curvatures, momenta = [], []
    for dtype in (torch.bfloat16, torch.float32):
        posterior = make(name, dtype, lr=0.0)
        run(posterior, 1, scale=10.0 if name == "ogn" else 1.0)  # whose first curvature is the first batch's
        before = posterior.curvature.clone()
        run(posterior, 150)
        curvatures.append((before, posterior.curvature))
        momenta.append(posterior.momentum)
    low, full = curvatures
    assert low[1].dtype is momenta[0].dtype is torch.float32
    assert low[1].mean() < 0.9 * low[0].mean()
    assert low[1].mean().item() == pytest.approx(full[1].mean().item(), rel=0.02)
    assert momenta[0].norm().item() == pytest.approx(momenta[1].norm().item(), rel=0.2)  # other random numbers


def test_it_learns_and_keeps_the_networks_precision(name: str) -> None:
    posterior = make(name, lr=0.1)
    terms = run(posterior, 60)
    assert all(math.isfinite(t.loss) for t in terms)
    assert sum(t.nll for t in terms[-5:]) < 0.8 * sum(t.nll for t in terms[:5])
    assert {p.dtype for p in posterior.model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in posterior.draw().values()} <= {torch.bfloat16}
    if hasattr(posterior, "std"):
        assert {w.dtype for w in posterior.std().values()} == {torch.bfloat16}


def test_a_saved_state_continues_identically(name: str, tmp_path: Path) -> None:
    posterior = make(name)
    run(posterior, 3)
    again = make(name)
    again.load_state_dict(posterior.state_dict())
    loaded = credo.load(credo.save(posterior, tmp_path / "posterior.safetensors"), model=network(torch.float32))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.curvature.dtype is torch.float32
    assert torch.equal(loaded.curvature, posterior.curvature)
    loaded.generator.set_state(posterior.generator.get_state())
    wanted = run(posterior, 3)
    assert run(again, 3) == run(loaded, 3) == wanted
