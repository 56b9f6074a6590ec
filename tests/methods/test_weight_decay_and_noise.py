"""Weight decay leaves deviations alone; members of an ensemble learn a noise of their own."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.models import build_model


def test_weight_decay_acts_on_means_and_never_on_deviations() -> None:
    net = nn.Linear(4, 2)
    posterior = credo.BBB(net, data_size=10, temperature=0.0, optimizer={"name": "adamw", "weight_decay": 0.5}, lr=0.1)
    rho, weight = posterior.rho.detach().clone(), net.weight.detach().clone()
    posterior.step(lambda model: (model(torch.zeros(3, 4)) * 0).sum())  # no gradient but zero
    assert torch.equal(posterior.rho, rho)
    assert torch.allclose(net.weight, weight * (1 - 0.1 * 0.5))


def test_decay_free_groups_keep_their_state_over_a_round_trip() -> None:
    def make() -> credo.BBB:
        return credo.BBB(build_model("mlp", inputs=[3], classes=2, seed=0), data_size=10, optimizer="adamw")

    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    whole, first = make(), make()
    for posterior, steps in ((whole, 6), (first, 3)):
        for _ in range(steps):
            posterior.step(lambda model: F.cross_entropy(model(x), y))
    second = make()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        second.step(lambda model: F.cross_entropy(model(x), y))
    assert torch.equal(second.rho, whole.rho)


def test_members_learn_their_own_noise_and_prediction_pools_the_variances() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    y = x + 0.3 * torch.randn(64, 1, generator=generator)
    noise = {"kind": "gaussian", "std": 1.0, "learn": True}
    members = [
        credo.MAP(build_model("mlp", inputs=[1], classes=1, seed=s), data_size=64, lr=lr, likelihood=noise)
        for s, lr in ((0, 0.03), (1, 1e-5))
    ]
    ensemble = credo.Ensemble(members)
    credo.fit(ensemble, [(x, y)], epochs=60, progress=False)
    stds = [float(F.softplus(member.likelihood.noise_rho.detach())) for member in members]
    with torch.no_grad():
        residuals = [float((member.model(x) - y).square().mean().sqrt()) for member in members]
    assert residuals[1] > 1.1 * residuals[0]  # its rate is small
    assert stds == pytest.approx(residuals, rel=0.1)
    prediction = credo.predict(ensemble, x, draws=2)
    pooled = math.sqrt(sum(std**2 for std in stds) / 2)
    assert torch.allclose(prediction.aleatoric, torch.full((64, 1), pooled), rtol=1e-5)


def test_a_point_estimate_runs_once_and_has_no_monte_carlo_error() -> None:
    calls = []
    net = nn.Linear(4, 3)
    net.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    prediction = credo.predict(credo.MAP(net, data_size=10), torch.randn(5, 4), draws=32, strategy="loop")
    assert calls == [5]
    assert prediction.draws_used.tolist() == [1] * 5
    assert prediction.mc_error.tolist() == [0.0] * 5
    assert prediction.epistemic.abs().max() < 1e-6


def test_the_monte_carlo_error_counts_one_draw_of_the_largest_variance() -> None:
    from credo.core.likelihood import Categorical
    from credo.predict.moments import ClassMoments

    p = torch.tensor([0.9, 0.8, 0.95, 0.9])
    outputs = torch.stack([p, 1 - p], -1).log().unsqueeze(1)  # [4 draws, 1 input, 2 classes]
    moments = ClassMoments(Categorical(), outputs, None)
    mean = p.mean()
    variance = (((p - mean) ** 2).sum() + mean * (1 - mean)) / 4
    assert float(moments.error()) == pytest.approx(float((variance / 4).sqrt()), rel=1e-4)
