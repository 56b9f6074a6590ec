"""Adversarial Sampling within VOGN: gradients and squares at the draw and at the worst weights near it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attacked import N, Recorded, data, flat, mlp, with_batchnorm
from torch import Tensor, nn
from torch.nn import functional as F

from credo import VOGN, AdversarialSampling, load, per_example_squares, save


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything here holds with and without compiled passes."""
    monkeypatch.setenv("CREDO_KERNELS", "1" if request.param == "compiled" else "0")
    return request.param


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_vogn_mixes_gradients_and_squares(weight: float) -> None:
    attack = AdversarialSampling(steps=3, step_size=0.1, weight=weight)
    posterior = VOGN(mlp(), data_size=N, noise=attack, momentum=0.0, curvature=0.9, prior_precision=2.0)
    posterior.step(Recorded())  # at the mean: there is no noise yet
    nll, mean, before = Recorded(), flat(posterior.mean()), posterior.curvature.clone()
    std = flat(posterior.std())
    terms = posterior.step(nll)
    assert len(nll.seen) == 3 + (2 if weight < 1 else 1)
    eps, start = (flat(nll.seen[-1]) - mean) / std, (flat(nll.seen[-4]) - mean) / std
    assert 0.29 < float((eps - start).abs().max()) < 0.31, "three ascents of a tenth"
    for before_it, after_it in zip(nll.seen[-4:], nll.seen[-3:], strict=False):
        net = mlp()
        net.load_state_dict(before_it)
        F.cross_entropy(net(nll.x), nll.y).backward()
        signs = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).sign()
        torch.testing.assert_close((flat(after_it) - flat(before_it)) / std, 0.1 * signs, rtol=0, atol=1e-3)

    shares = {0: 1 - weight, -1: weight} if weight < 1 else {-1: 1.0}
    gradient, squares, loss = torch.zeros_like(mean), torch.zeros_like(mean), 0.0
    for index, share in shares.items():
        net = mlp()
        net.load_state_dict(nll.seen[index])
        found = per_example_squares(net, lambda m: F.cross_entropy(m(nll.x), nll.y))
        gradient += share * flat(found.gradients)
        squares += share * flat(found.squares) / len(nll.x)
        loss += share * found.loss
    torch.testing.assert_close(posterior.curvature, 0.9 * before + 0.1 * squares, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(posterior.momentum, gradient + 2.0 / N * mean, rtol=1e-4, atol=1e-6)
    assert terms.nll == pytest.approx(loss, rel=1e-5)


def test_vogn_has_no_kl_term_to_share_and_runs_losses_of_your_own_at_weight_0() -> None:
    with pytest.raises(ValueError, match="kl_in_weight"):
        VOGN(mlp(), data_size=N, noise=AdversarialSampling(kl_in_weight=True))
    posterior, (x, y) = VOGN(mlp(), data_size=N, noise=AdversarialSampling(weight=0)), data()
    with posterior.trial() as net:
        F.cross_entropy(net(x), y).backward()
    posterior.update()
    assert posterior.steps == 1


def test_vogn_with_weight_0_is_plain_bit_for_bit() -> None:
    noises = ("weights", AdversarialSampling(weight=0))
    plain, attacked = (VOGN(with_batchnorm(), data_size=N, noise=noise, draws=2, lr=0.05) for noise in noises)
    for _ in range(3):
        assert plain.step(Recorded()) == attacked.step(Recorded())
    assert torch.equal(plain.curvature, attacked.curvature)


def test_vogn_learns_with_it_and_keeps_statistics_and_settings(tmp_path: Any) -> None:
    net = with_batchnorm()
    attack = AdversarialSampling(steps=2, weight=0.5)
    posterior = VOGN(net, data_size=4000, noise=attack, lr=0.05, damping=0.01, prior_precision=1.0)
    values = [posterior.step(Recorded()).nll for _ in range(60)]
    assert values[-1] < 0.8 * values[0]
    assert int(net[1].num_batches_tracked) == 60
    save(posterior, tmp_path / "v.safetensors")
    assert load(tmp_path / "v.safetensors", model=with_batchnorm()).config()["noise"] == attack.config()
    with pytest.raises(RuntimeError, match="runs the loss itself"), posterior.trial():
        pass


def test_learned_noise_counts_each_loss_at_its_share() -> None:
    """The likelihood's own parameter sees (1 − λ)·loss + λ·adversarial loss, as the weights do."""
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))
    values: list[float] = []

    def build(noise: Any) -> VOGN:
        torch.manual_seed(0)
        likelihood = {"kind": "gaussian", "std": 0.5, "learn": True}
        return VOGN(nn.Linear(3, 1), data_size=N, noise=noise, likelihood=likelihood, curvature={"init": 1e8})

    def gradient(noise: Any) -> float:
        posterior = build(noise)
        (own,) = posterior.likelihood.parameters()

        def nll(net: nn.Module) -> Tensor:
            value = posterior.likelihood.nll(net(x), torch.zeros(16, 1)).mean()
            values.append(value.item())
            return value

        posterior.gather(nll)
        assert own.grad is not None
        return float(own.grad)

    # σ is so small that all draws are alike: the shares must add up to one.
    assert gradient(AdversarialSampling(steps=0, weight=0.3)) == pytest.approx(gradient("weights"), rel=1e-3)
    assert len(values) == 3


def test_inputs_changed_in_place_are_found_after_the_first_step() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.shifts = mlp(), False

        def forward(self, x: Tensor) -> Tensor:
            if self.shifts:
                x -= 0.5
            return self.inner(x)

    (x, y), net = data(), Shifting()
    posterior = VOGN(net, data_size=N, noise="adversarial", curvature=0.9)
    for _ in range(2):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    net.shifts = True
    with pytest.raises(ValueError, match="changes its input in place"):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
