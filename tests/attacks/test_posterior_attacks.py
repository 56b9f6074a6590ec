"""Posteriors under attack: gradients through several draws, what each threat sees, success judged more than once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.attacks import THREATS, fgsm, minimal, pgd, posterior_logits, success_rate

CLASSES = 3


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def bbb(std: float = 0.3, seed: int = 0) -> credo.BBB:
    return credo.BBB(network(seed), data_size=100, init=std)


def data(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 5, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def networks(posterior: credo.Posterior, logits: Any) -> list[dict[str, Tensor]]:
    """The weights behind the next look, made in the way that a look makes them."""
    from credo.attacks.posterior import _seed

    with torch.no_grad(), posterior.seeded(_seed(logits.seed, logits.calls + 1)):
        return list(posterior.iter_draws(logits.draws))


def test_the_gradient_is_the_mean_of_the_draws_gradients() -> None:
    posterior, (x, y) = bbb(), data()
    logits = posterior_logits(posterior, "fresh", draws=4, seed=7)
    weights = networks(posterior, logits)
    stepped = fgsm(logits, x, y, epsilon=0.2, norm="l2", bounds=(-9.0, 9.0)).inputs - x
    each = []
    for draw in weights:
        leaf = x.clone().requires_grad_()
        F.cross_entropy(torch.func.functional_call(posterior.model, draw, (leaf,)), y, reduction="sum").backward()
        each.append(leaf.grad)
    mean = torch.stack(each).mean(0)
    torch.testing.assert_close(stepped, 0.2 * F.normalize(mean), rtol=1e-3, atol=1e-5)


def test_the_mixture_differentiates_the_averaged_probabilities() -> None:
    posterior, (x, y) = bbb(), data()
    logits = posterior_logits(posterior, "mixture", draws=5)
    weights = networks(posterior, logits)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.nll_loss(logits(leaf), y).backward()
    outputs = [torch.func.functional_call(posterior.model, draw, (other,)).softmax(1) for draw in weights]
    F.nll_loss(torch.stack(outputs).mean(0).log(), y).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("threat", ["fresh", "mixture"])
def test_fresh_draws_are_fresh_and_repeat_from_the_start(threat: str) -> None:
    posterior, (x, _) = bbb(), data()
    first, again = (posterior_logits(posterior, threat, draws=2, seed=3) for _ in range(2))
    looks = [first(x), first(x)]
    assert not torch.equal(looks[0], looks[1])
    assert torch.equal(again(x), looks[0])
    assert torch.equal(again(x), looks[1])
    assert not torch.equal(posterior_logits(posterior, threat, draws=2, seed=4)(x), looks[0])


@pytest.mark.parametrize("threat", ["fixed", "one"])
def test_fixed_draws_stay(threat: str) -> None:
    posterior, (x, _) = bbb(), data()
    logits = posterior_logits(posterior, threat, draws=3, seed=3)
    assert torch.equal(logits(x), logits(x))
    assert logits(x).shape == (12, CLASSES)
    torch.testing.assert_close(logits(x).exp().sum(1), torch.ones(12))
    with torch.no_grad():
        posterior.model[0].weight.add_(1.0)  # a step of training: the kept draws are not views of the mean
    assert torch.equal(logits(x), logits(x))


def test_shapes_and_mixtures() -> None:
    (x, _), pair = data(), credo.Ensemble([credo.MAP(network(seed), data_size=9) for seed in range(2)])
    logits = posterior_logits(pair, "fresh", draws=5)
    assert logits(x).shape == (2, 12, CLASSES)
    assert torch.equal(logits(x)[1], pair.parts[1].model(x).log_softmax(1))
    point = credo.MAP(network(), data_size=9)
    assert posterior_logits(point, draws=8)(x).shape == (1, 12, CLASSES)
    alone = posterior_logits(pair, "one")(x)
    assert any(torch.allclose(alone, part.model(x).log_softmax(1)) for part in pair.parts)


def test_attacks_agree_with_attacks_on_the_plain_network() -> None:
    (x, y), point = data(), credo.MAP(network(), data_size=9)
    plain, wrapped = (pgd(f, x, y, epsilon=0.1, steps=5) for f in (point.model, posterior_logits(point)))
    torch.testing.assert_close(plain.inputs, wrapped.inputs)


def test_two_classes_of_one_logit() -> None:
    net = nn.Linear(5, 1)
    posterior = credo.MAP(net, data_size=9, likelihood="bernoulli")
    x, _ = data()
    y = (net(x)[:, 0] > 0).long()
    found = minimal(posterior_logits(posterior), x, y, confidence=0.0, bounds=(-99.0, 99.0))
    distance = (net(x)[:, 0].abs() / net.weight.norm()).detach()
    torch.testing.assert_close((found.inputs - x).norm(dim=1), distance, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("threat", THREATS)
def test_the_posterior_is_left_alone(threat: str) -> None:
    posterior, (x, y) = bbb(), data()
    posterior.train()
    before = {name: v.clone() for name, v in posterior.state_dict().items() if isinstance(v, Tensor)}
    generator, everywhere = posterior.generator.get_state(), torch.get_rng_state()
    pgd(posterior_logits(posterior, threat, draws=2), x, y, epsilon=0.1, steps=2)
    assert torch.equal(posterior.generator.get_state(), generator)
    assert torch.equal(torch.get_rng_state(), everywhere)
    assert all(module.training for module in posterior.modules())
    assert all(torch.equal(posterior.state_dict()[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in posterior.parameters())


def test_more_draws_attack_better() -> None:
    """A gradient of one noisy network leads less far than the mean of thirty, judged by the same hundred networks."""
    posterior, (x, y) = bbb(std=0.5), data(200)
    options: dict[str, Any] = {"epsilon": 0.1, "steps": 10, "random_start": False}
    losses = []
    for draws in (1, 30):
        found = pgd(posterior_logits(posterior, "fresh", draws=draws), x, y, **options).inputs
        judges = posterior_logits(posterior, "fresh", draws=100, seed=99)(found).mean(0)
        losses.append(F.nll_loss(judges, y).item())
    assert losses[1] > losses[0] * 1.02


def test_a_network_that_works_in_place() -> None:
    net = network()
    changed = nn.Sequential(nn.ReLU(inplace=True), net)
    x, y = data()
    kept = x.clone()
    for function in (changed, posterior_logits(credo.BBB(changed, data_size=9), draws=2)):
        found = pgd(function, x, y, epsilon=0.1, steps=2, bounds=(-1.0, 1.0))
        assert torch.equal(x, kept)
        assert bool(((found.inputs - x).abs() > 0).any())
    torch.testing.assert_close(pgd(changed, x, y, epsilon=0.1).inputs, pgd(net, x, y, epsilon=0.1).inputs)


def test_dropout() -> None:
    posterior, (x, y) = credo.MCDropout(network(), data_size=9, rate=0.5), data()
    logits = posterior_logits(posterior, "fresh", draws=4)
    looks = logits(x)
    assert looks.shape == (4, 12, CLASSES)
    assert not torch.equal(looks[0], looks[1])
    assert len(pgd(logits, x, y, epsilon=0.1, steps=2)) == 12
    with pytest.raises(ValueError, match="no fixed networks"):
        posterior_logits(posterior, "fixed")


def test_success_is_judged_more_than_once() -> None:
    """A coin: of 400 inputs and 50 tosses each, the mean share is off by 0.02 less than once in 10⁶."""
    generator = torch.Generator().manual_seed(0)

    def coin(x: Tensor) -> Tensor:
        side = torch.randint(2, (len(x),), generator=generator)
        return F.one_hot(side, 2).float() + x.sum() * 0

    x, y = torch.rand(400, 2), torch.zeros(400, dtype=torch.int64)
    shares = success_rate(coin, x, y, evaluations=50)
    assert abs(float(shares.mean()) - 0.5) < 0.02
    assert float(shares.min()) > 0.1
    # The best of 41 looks would always have succeeded; the result says what a look of its own says.
    found = pgd(coin, x, y, epsilon=0.1, steps=40)
    assert abs(float(found.success.double().mean()) - 0.5) < 0.15


def test_success_rate_of_a_certain_function() -> None:
    net, (x, y) = network(), data()
    shares = success_rate(net, x, y, evaluations=3, batch_size=5)
    assert torch.equal(shares, (net(x).argmax(1) != y).double())
    targets = (y + 1) % CLASSES
    assert torch.equal(success_rate(net, x, y, targets=targets), (net(x).argmax(1) == targets).double())


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"Unknown threat 'frsh'\. Did you mean 'fresh'"):
        posterior_logits(bbb(), "frsh")
    with pytest.raises(ValueError, match="draws=0"):
        posterior_logits(bbb(), draws=0)
    with pytest.raises(TypeError, match="classification likelihood"):
        posterior_logits(credo.MAP(nn.Linear(5, 1), data_size=9, likelihood="gaussian"))
    x, y = data()
    with pytest.raises(ValueError, match="evaluations=0"):
        success_rate(network(), x, y, evaluations=0)
    assert math.isclose(float(success_rate(network(), x, y).mean()) * 12 % 1, 0, abs_tol=1e-9)
