"""VOGN without a rate: the means take Adam's steps, the noise stays that of the curvature."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > X[:, 1]).long()
COLD = 1e-20  # neither noise nor prior


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(scale: float = 1.0) -> Callable[[nn.Module], Tensor]:
    return lambda net: scale * F.cross_entropy(net(X), Y)


@pytest.mark.parametrize("kernels", ["1", "0"])
def test_without_noise_and_prior_the_means_are_those_of_adam(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "0":
        monkeypatch.setenv("CREDO_KERNELS", "0")
    posterior = credo.VOGN(network(), data_size=60, temperature=COLD)
    net = network()
    adam = torch.optim.Adam(net.parameters(), 1.5e-2)
    for _ in range(30):
        posterior.step(loss_of())
        adam.zero_grad()
        loss_of()(net).backward()
        adam.step()
    for ours, theirs in zip(posterior.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_steps_do_not_depend_on_the_scale_of_the_loss() -> None:
    moved = []
    for scale in (1.0, 100.0):
        posterior = credo.VOGN(network(), data_size=60, temperature=COLD)
        for _ in range(10):
            posterior.step(loss_of(scale))
        moved.append(torch.cat([p.detach().flatten() for p in posterior.model.parameters()]))
    torch.testing.assert_close(*moved, rtol=1e-3, atol=1e-4)


def test_the_noise_is_that_of_the_curvature() -> None:
    posterior = credo.VOGN(network(), data_size=60, temperature=0.5, damping=0.2, prior_precision=3.0)
    for _ in range(5):
        posterior.step(loss_of())
    std = torch.cat([s.flatten() for s in posterior.std().values()])
    assert torch.allclose(std**2, 0.5 / (60 * (posterior.curvature + 0.2) + 0.5 * 3.0))


def test_a_rate_is_one_of_natural_gradients() -> None:
    assert credo.VOGN(network(), data_size=60).squares is not None
    assert credo.VOGN(network(), data_size=60, lr=1e-2).squares is None
    assert credo.VOGN(network(), data_size=60, update="natural").rates == 1e-2
    assert credo.VOGN(network(), data_size=60, lr=1e-3, update="adam").squares is not None
    with pytest.raises(ValueError, match=r"update.*'natural'"):
        credo.VOGN(network(), data_size=60, update="naturel")


def test_squares_are_saved_and_pruned(tmp_path: Path) -> None:
    posterior = credo.VOGN(network(), data_size=60, temperature=0.1)
    posterior.step(loss_of())
    credo.save(posterior, tmp_path / "one.safetensors")
    loaded = credo.load(tmp_path / "one.safetensors", network())
    assert isinstance(loaded, credo.VOGN)
    assert posterior.squares is not None
    assert loaded.squares is not None
    assert torch.equal(loaded.squares, posterior.squares)
    kept = posterior.squares.numel() - 4
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in posterior.model.named_parameters()}
    masks["0.weight"].view(-1)[:4] = False
    posterior.keep_(masks)
    assert posterior.squares.numel() == kept
    posterior.step(loss_of())
