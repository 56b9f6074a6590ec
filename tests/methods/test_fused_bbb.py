"""BBB's compiled passes give the step that torch gives, and neither path is needed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.kernels import flat
from credo.core.kernels.build import library
from credo.methods.bbb import bbb

needs_kernels = pytest.mark.skipif(library("flat") is None, reason="no compiled kernels here")


class Net(nn.Module):
    """Conv and BatchNorm, a tied weight, a parameter that is never used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.a, self.b, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.out = nn.Linear(16, 3)
        self.out.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True).mean(1).flatten(1)
        return self.out(self.b(torch.tanh(self.a(x))))


def trained(steps: int, **options: Any) -> tuple[credo.BBB, list[credo.Terms]]:
    torch.manual_seed(0)
    posterior = credo.BBB(Net(), data_size=50, init=0.05, lr=0.01, seed=4, **options)
    x, y = torch.randn(10, 1, 6, 6), torch.randint(3, (10,))
    return posterior, [posterior.step(lambda net: F.cross_entropy(net(x), y)) for _ in range(steps)]


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draws": 3},
        {"prior": credo.priors.Gaussian(mean=0.3, std=0.2), "temperature": 5.0},
        {"optimizer": {"name": "sgd", "clip_norm": 0.01}},
        {"random": "weights", "optimizer": {"weight_decay": 0.1}},
    ],
)
def test_compiled_steps_equal_torch_steps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused, fused_terms = trained(8, **options)
    monkeypatch.setattr(flat, "fused", lambda *_: False)
    plain, plain_terms = trained(8, **options)
    for (name, a), b in zip(fused.state_dict().items(), plain.state_dict().values(), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    for one, other in zip(fused_terms, plain_terms, strict=True):
        assert one.nll == pytest.approx(other.nll, rel=1e-4)
        assert one.kl == pytest.approx(other.kl, rel=1e-4)


@needs_kernels
def test_the_compiled_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bbb, "TorchGradients", lambda *_: pytest.fail("torch's path"))
    trained(1)


@pytest.mark.parametrize("options", [{}, {"draws": 2}, {"noise": "lrt"}, {"prior": credo.priors.ScaleMixture()}])
def test_without_compiled_code(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "0")
    monkeypatch.setattr(flat, "CompiledGradients", lambda *_: pytest.fail("compiled path"))
    posterior, terms = trained(40, **options)
    assert terms[-1].nll < terms[0].nll
    again, _ = trained(40, **options)
    assert torch.equal(posterior.rho, again.rho)


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        {"noise": "lrt"},
        {"kl_term": "monte-carlo"},
        {"prior": credo.priors.Laplace()},
        {"prior": credo.priors.Gaussian(0.0, {"*": 1.0})},
    ],
)
def test_what_the_compiled_path_leaves_to_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "CompiledGradients", lambda *_: pytest.fail("compiled path"))
    trained(1, **options)


def test_double_precision_leaves_it_to_torch() -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(nn.Linear(3, 2).double(), data_size=10)
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randint(2, (4,))
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert posterior.draw()["weight"].dtype is torch.float64


@needs_kernels
def test_same_draw_with_and_without_gradients() -> None:
    posterior, _ = trained(2)
    with posterior.seeded(1), torch.no_grad():
        a = posterior.draw()
    with posterior.seeded(1):
        b = posterior.draw()
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)
    assert b["conv.weight"].requires_grad


@needs_kernels
def test_a_nan_gradient_changes_nothing_and_is_named() -> None:
    posterior, _ = trained(1)
    before = {n: p.clone() for n, p in posterior.named_parameters()}

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float("nan")

    x = torch.randn(10, 1, 6, 6)
    with pytest.raises(credo.NonFiniteError, match=r"conv\.weight"):
        posterior.step(lambda net: Bad.apply(net(x)).mean())
    assert all(torch.equal(before[n], p) for n, p in posterior.named_parameters())


def trained_past_the_draw(steps: int, std: float, factor: float = 1.0, **options: Any) -> credo.BBB:
    """Trained on a loss that also reads two of the means themselves, one of them a weight, past the draw."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    posterior = credo.BBB(net, data_size=50, init=std, seed=4, **options)
    weight, bias = net[0].weight, net[2].bias  # while a draw is in their place, the network has others
    x, y = torch.randn(10, 4), torch.randint(2, (10,))
    for _ in range(steps):
        posterior.step(
            lambda net: F.cross_entropy(net(x), y) + factor * ((weight - 3).square().mean() + (bias + 2).exp().sum())
        )
    return posterior


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"draws": 3}, {"optimizer": {"name": "sgd", "clip_norm": 0.3}, "lr": 0.1}])
@pytest.mark.parametrize("without", ["this pass", "any kernel"])
def test_what_a_loss_takes_from_the_means_past_the_draw_counts(
    options: dict[str, Any], without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without any kernel the noise has other numbers: there it must be too small to matter.
    std = 1e-7 if without == "any kernel" else 0.05
    fused, blind = trained_past_the_draw(5, std, **options), trained_past_the_draw(5, std, factor=0.0, **options)
    if without == "any kernel":
        monkeypatch.setenv("CREDO_KERNELS", "0")
    monkeypatch.setattr(flat, "CompiledGradients", lambda *_: pytest.fail("compiled path"))
    monkeypatch.setattr(flat, "fused", lambda *_: False)
    plain = trained_past_the_draw(5, std, **options)
    for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.allclose(fused.model[0].weight, blind.model[0].weight, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize("clip_norm", [0.01, 0.3])
def test_clipping_is_by_the_norm_of_all_that_counts(clip_norm: float) -> None:
    start = trained_past_the_draw(0, 0.05)
    moved = trained_past_the_draw(1, 0.05, factor=10.0, optimizer={"name": "sgd", "clip_norm": clip_norm}, lr=1.0)
    pairs = zip(moved.parameters(), start.parameters(), strict=True)
    way = torch.cat([(a - b).detach().reshape(-1).double() for a, b in pairs])
    assert float(way.norm()) == pytest.approx(clip_norm, rel=1e-4)


@needs_kernels
def test_an_infinite_gradient_past_the_draw_is_seen() -> None:
    posterior = trained_past_the_draw(0, 0.05)
    before = {n: p.detach().clone() for n, p in posterior.named_parameters()}
    weight, x = posterior.model[0].weight, torch.randn(10, 4)
    with pytest.raises(credo.NonFiniteError, match=r"gradient of 0\.weight"):
        # The square root's derivative at 0 is infinite, its value is not.
        posterior.step(lambda net: net(x).square().mean() + (weight - weight.detach()).clamp_min(0).sqrt().sum())
    assert all(torch.equal(before[n], p) for n, p in posterior.named_parameters())
