"""Adversarial Sampling against the obvious way to write it: an ascent on ε by autograd, Eq. 3 by autograd."""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from attacked import N, Recorded, flat, mlp, with_batchnorm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from credo import BBB, VOGN, AdversarialSampling, UnsupportedModelError, load, save
from credo.core.network.substitute import substituted
from credo.core.prior import Laplace, ScaleMixture
from credo.methods.adversarial_sampling import make_attack


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything here holds with and without compiled passes."""
    monkeypatch.setenv("CREDO_KERNELS", "1" if request.param == "compiled" else "0")
    return request.param


def sgd(net: nn.Module, noise: Any, **options: Any) -> BBB:
    """Steps of −gradient, so that parameters tell the gradient."""
    options = {"init": 0.3, **options}
    return BBB(net, data_size=N, noise=noise, optimizer="sgd", lr=1.0, **options)


def slope_by_noise(posterior: BBB, eps: Tensor, nll: Any) -> Tensor:
    """∂ loss / ∂ε by autograd through μ + σ·ε, the slow obvious way."""
    eps = eps.clone().requires_grad_()
    weights = flat(posterior.mean()) + flat(posterior.std()) * eps
    with substituted(posterior.model, posterior.layout.split(weights)):
        return torch.autograd.grad(nll(posterior.model), eps)[0]


def test_the_inner_loop_is_a_sign_ascent_on_the_noise() -> None:
    posterior, nll = sgd(mlp(), AdversarialSampling(steps=4, step_size=0.05, weight=0.5)), Recorded()
    mean, std = flat(posterior.mean()), flat(posterior.std())
    reference = sgd(mlp(), "weights")
    posterior.step(nll)
    assert len(nll.seen) == 1 + 4 + 1
    noises = [(flat(seen) - mean) / std for seen in nll.seen]
    eps = noises[1]
    for reached in noises[2:]:
        eps = eps + 0.05 * slope_by_noise(reference, eps, Recorded()).sign()
        torch.testing.assert_close(reached, eps, rtol=0, atol=2e-5)
    assert (noises[0] - noises[1]).abs().mean() > 0.5, "the attack starts at a draw of its own"


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("kl_in_weight", [False, True])
def test_a_step_is_the_gradient_of_equation_3(steps: int, weight: float, draws: int, kl_in_weight: bool) -> None:
    attack = AdversarialSampling(steps=steps, step_size=0.1, weight=weight, kl_in_weight=kl_in_weight)
    posterior, nll = sgd(mlp(), attack, draws=draws, prior=0.5), Recorded()
    before, reference = flat(posterior.mean()), sgd(mlp(), "weights", prior=0.5)
    rho_before = posterior.rho.detach().clone()
    terms = posterior.step(nll)
    plain = nll.seen[:draws] if weight < 1 else []
    worst = nll.seen[len(plain) + steps :: steps + 1]
    assert len(nll.seen) == len(plain) + draws * (steps + 1)
    assert len(worst) == draws

    mean, rho = before.clone().requires_grad_(), rho_before.clone().requires_grad_()
    std = F.softplus(rho)

    def loss_at(seen: dict[str, Tensor]) -> Tensor:
        eps = (flat(seen) - before) / F.softplus(rho_before)
        with substituted(reference.model, reference.layout.split(mean + std * eps)):
            return F.cross_entropy(reference.model(nll.x), nll.y)

    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(torch.tensor(0.0), torch.tensor(0.5))
    ).sum()
    total = (
        weight * torch.stack([loss_at(seen) for seen in worst]).mean() + (1 - weight if kl_in_weight else 1) * kl / N
    )
    if plain:
        total = total + (1 - weight) * torch.stack([loss_at(seen) for seen in plain]).mean()
    by_mean, by_rho = torch.autograd.grad(total, (mean, rho))
    torch.testing.assert_close(before - flat(posterior.mean()), by_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rho_before - posterior.rho.detach(), by_rho, rtol=1e-4, atol=1e-5)
    assert by_rho.abs().max() > 0
    assert terms.loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert terms.loss == pytest.approx(terms.nll + terms.penalty)


@pytest.mark.part(2)
@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("prior", [0.5, ScaleMixture(), Laplace(0.0, 0.3)])
def test_with_weight_1_a_monte_carlo_kl_is_of_draws_of_its_own(prior: Any, draws: int) -> None:
    """Averaged over many steps from the same state it is the KL: in closed form, or that of many plain estimates."""
    posterior = sgd(mlp(), AdversarialSampling(steps=0, weight=1.0), draws=draws, prior=prior, kl_term="monte-carlo")
    posterior.lr_scale, batch = 0.0, Recorded()  # so that nothing moves
    estimates = [posterior.step(lambda net: F.cross_entropy(net(batch.x), batch.y)).kl for _ in range(200)]
    reference = sgd(mlp(), "weights", prior=prior, kl_term="monte-carlo")
    with torch.no_grad():
        plain = torch.stack([reference.kl() for _ in range(1000)])
    found = torch.tensor(estimates)
    error = math.hypot(float(found.std()) / 200**0.5, float(plain.std()) / 1000**0.5)
    assert abs(float(found.mean() - plain.mean())) < 4 * error, "false alarm: 1 in 16,000"
    assert 4 * error < 0.2 * float(plain.mean()), "half of it would be noticed"


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("prior", [0.5, ScaleMixture(), Laplace(0.0, 0.3)])
def test_a_monte_carlo_kl_is_that_of_the_plain_draws(prior: Any, draws: int) -> None:
    """Equation 3 with log q(w) − log p(w) at the plain draws in the place of the KL, once."""
    attack = AdversarialSampling(steps=2, step_size=0.1, weight=0.3)
    posterior, nll = sgd(mlp(), attack, draws=draws, prior=prior, kl_term="monte-carlo"), Recorded()
    before, reference = flat(posterior.mean()), sgd(mlp(), "weights", prior=prior, kl_term="monte-carlo")
    rho_before = posterior.rho.detach().clone()
    terms = posterior.step(nll)
    plain, worst = nll.seen[:draws], nll.seen[draws + 2 :: 3]
    mean, rho = before.clone().requires_grad_(), rho_before.clone().requires_grad_()
    total = torch.zeros(())
    for seen, share in [(s, 0.7) for s in plain] + [(s, 0.3) for s in worst]:
        weights = mean + F.softplus(rho) * ((flat(seen) - before) / F.softplus(rho_before))
        with substituted(reference.model, reference.layout.split(weights)):
            total = total + share / draws * F.cross_entropy(reference.model(nll.x), nll.y)
        if share == 0.7:
            log_q = torch.distributions.Normal(mean, F.softplus(rho)).log_prob(weights).sum()
            total = total + (log_q - reference.prior.log_prob(weights)) / (N * draws)
    by_mean, by_rho = torch.autograd.grad(total, (mean, rho))
    torch.testing.assert_close(before - flat(posterior.mean()), by_mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rho_before - posterior.rho.detach(), by_rho, rtol=1e-3, atol=1e-4)
    assert terms.loss == pytest.approx(float(total.detach()), rel=1e-4)


def test_weight_0_is_plain_bbb_bit_for_bit() -> None:
    plain, attacked = (
        sgd(with_batchnorm(), noise, draws=2, random="*") for noise in ("weights", AdversarialSampling(weight=0))
    )
    for _ in range(3):
        assert plain.step(Recorded()) == attacked.step(Recorded())
    for name, tensor in plain.state_dict().items():
        if isinstance(tensor, Tensor):
            assert torch.equal(tensor, attacked.state_dict()[name]), name


def test_the_ascent_raises_the_loss_on_average() -> None:
    gains = []
    for seed in range(20):
        nll = Recorded()
        sgd(mlp(), AdversarialSampling(steps=5, step_size=0.1), seed=seed).step(nll)
        gains.append(nll.values[-1] - nll.values[1])
    # Rises in each of 20 cases: by chance 1 in a million.
    assert min(gains) > 0


def test_the_radius_bounds_the_way_from_the_draw() -> None:
    posterior, nll = sgd(mlp(), AdversarialSampling(steps=5, step_size=0.1, radius=0.25, weight=1.0)), Recorded()
    mean, std = flat(posterior.mean()), flat(posterior.std())
    posterior.step(nll)
    noises = torch.stack([(flat(seen) - mean) / std for seen in nll.seen])
    way = (noises - noises[0]).abs().amax(dim=1)
    torch.testing.assert_close(way, torch.tensor([0, 0.1, 0.2, 0.25, 0.25, 0.25]), rtol=0, atol=1e-5)


def test_only_the_first_pass_counts_for_running_statistics() -> None:
    nets = [with_batchnorm() for _ in range(3)]
    attack = {"steps": 4, "step_size": 0.1, "weight": 0.5}
    noises = ("weights", AdversarialSampling(**attack), AdversarialSampling(**attack, attack_statistics=True))
    for net, noise in zip(nets, noises, strict=True):
        sgd(net, noise).step(Recorded())
    plain, attacked, all_passes = (net[1] for net in nets)
    assert torch.equal(plain.running_mean, attacked.running_mean)
    assert torch.equal(plain.running_var, attacked.running_var)
    assert (int(attacked.num_batches_tracked), int(all_passes.num_batches_tracked)) == (1, 6)


@pytest.mark.parametrize("method", [BBB, VOGN])
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_with_attack_statistics_every_pass_counts(method: Any, weight: float) -> None:
    net, nll = with_batchnorm(), Recorded()
    attack = AdversarialSampling(steps=3, weight=weight, attack_statistics=True)
    options = {} if method is BBB else {"curvature": {"init": 0.3}}  # without it VOGN's first step is at the mean
    method(net, data_size=N, noise=attack, draws=2, **options).step(nll)
    assert int(net[1].num_batches_tracked) == len(nll.seen) == 2 * (4 + (weight < 1))


def test_reentrant_checkpoints_are_refused_since_they_hide_weights() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.last, self.reentrant = nn.Linear(3, 8), nn.Linear(8, 4), reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_() if self.reentrant else x
            return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))

    sgd(Checkpointed(False), AdversarialSampling()).step(Recorded())
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        sgd(Checkpointed(True), AdversarialSampling()).step(Recorded())


def test_weights_that_the_loss_does_not_use_are_left_alone() -> None:
    class Idle(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    posterior, nll = sgd(Idle(nn.Linear(3, 4), nn.Linear(2, 2)), AdversarialSampling(steps=2)), Recorded()
    posterior.step(nll)
    assert torch.equal(nll.seen[1]["1.weight"], nll.seen[-1]["1.weight"])
    assert not torch.equal(nll.seen[1]["0.weight"], nll.seen[-1]["0.weight"])


def test_with_weight_1_the_adversarial_pass_counts() -> None:
    net = with_batchnorm()
    sgd(net, AdversarialSampling(weight=1.0)).step(Recorded())
    assert int(net[1].num_batches_tracked) == 1


def test_the_ascent_differentiates_by_weights_alone() -> None:
    net = mlp()
    times: list[int] = []
    net[0].weight.register_hook(lambda _: times.append(1))
    sgd(net, AdversarialSampling(steps=5), random="2.*").step(Recorded())
    assert len(times) == 2, "gradients of other parameters are needed for the two losses only"


@pytest.mark.part(3)
@pytest.mark.parametrize("prior", [ScaleMixture(0.5, 1.0, 0.1), {"kind": "laplace", "b": 0.2}, 0.3])
@pytest.mark.parametrize("weight", [0.8, 1.0])
def test_every_prior_and_random_batchnorm(prior: Any, weight: float) -> None:
    attack = AdversarialSampling(steps=2, weight=weight)
    posterior = BBB(with_batchnorm(), data_size=N, noise=attack, prior=prior, random="*", draws=2, lr=0.02)
    values = [posterior.step(Recorded()) for _ in range(60)]
    assert values[-1].loss < 0.7 * values[0].loss
    assert "1.weight" in posterior.std()


def test_it_survives_saving(tmp_path: Any) -> None:
    posterior = BBB(mlp(), data_size=N, noise={"kind": "adversarial", "steps": 2, "radius": 0.1})
    posterior.step(Recorded())
    save(posterior, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors", model=mlp())
    assert again.config()["noise"] == posterior.config()["noise"] == AdversarialSampling(2, radius=0.1).config()
    assert again.attack == AdversarialSampling(steps=2, radius=0.1)


def test_a_loss_that_fails_in_the_attack_changes_nothing() -> None:
    net = with_batchnorm()
    posterior, nll = sgd(net, AdversarialSampling(steps=3)), Recorded()
    before = {name: t.clone() for name, t in net.state_dict().items()}

    def fails_late(model: nn.Module) -> Tensor:
        value = nll(model)
        return value if len(nll.seen) < 3 else value * float("nan")

    with pytest.raises(ArithmeticError, match="The loss is nan at step 0"):
        posterior.step(fails_late)
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps=-1 must be a whole number"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"step_size": -0.1}, "step_size=-0.1 must be finite"),
        ({"weight": 1.5}, r"weight=1.5 must lie in \[0, 1\]"),
        ({"radius": 0.0}, "radius=0.0 must be positive"),
        ({"step_size": "0.02"}, "step_size='0.02' must be a number"),
        ({"weight": None}, "weight=None must be a number"),
        ({"radius": "1"}, "radius='1' must be a number"),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdversarialSampling(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    given = AdversarialSampling(
        steps=np.int64(3), step_size=np.float32(0.5), weight=Fraction(1, 4), radius=np.float64(1)
    )
    assert given == AdversarialSampling(3, 0.5, 0.25, 1.0)
    assert json.loads(json.dumps(given.config())) == given.config()


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"Unknown option of the noise adversarial 'lambda'.*step_size, steps, weight"):
        make_attack({"kind": "adversarial", "lambda": 0.8})
    with pytest.raises(ValueError, match="adversarial"):
        BBB(mlp(), data_size=N, noise="adverserial")


@pytest.mark.parametrize("method", [BBB, VOGN])
@pytest.mark.parametrize("case", ["half precision", "pruned"])
def test_the_ascent_moves_the_noise(method: Any, case: str) -> None:
    """Half precision and pruning make copies of the pieces of a vector, whose changes must not be lost."""
    net, nll = mlp(), Recorded()
    if case == "half precision":
        net, nll.x = net.bfloat16(), nll.x.bfloat16()
    options = {"init": 0.3} if method is BBB else {"curvature": {"init": 0.3}}
    posterior = method(
        net, data_size=N, noise=AdversarialSampling(steps=3, step_size=0.5, weight=1.0), lr=0.01, **options
    )
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in net.named_parameters()}
    if case == "pruned":
        masks["0.weight"][2:5] = False
        posterior.keep_(masks)
    std = posterior.std()
    posterior.step(nll)
    for before, after in zip(nll.seen, nll.seen[1:], strict=False):
        for name, mask in masks.items():
            moved = ((after[name] - before[name]).float().abs() / std[name].float())[mask]
            assert ((moved - 0.5).abs() < 0.1).float().mean() > 0.9, name  # a slope of exactly zero does not move
            assert torch.equal(after[name][~mask], before[name][~mask])
