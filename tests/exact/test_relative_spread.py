"""σ² = αμ²: its moments, its KL and its gradients, against autograd, Monte Carlo and quadratic forms by hand."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import credo
from credo.compress import compact, prune
from credo.core.description import parameter_counts
from credo.methods import BBB
from credo.methods.bbb.kl import ard_kl

FORMS = pytest.mark.parametrize("spread", ["relative", "relative-layer"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(16, 4, generator=generator).double()
    return x, torch.randint(3, (16,), generator=generator)


def make(spread: str, **options: object) -> BBB:
    settings = {"data_size": 100, "init": {"rho": (-2.0, 0.5)}, "optimizer": "sgd", "lr": 1e-3, **options}
    return BBB(network(), spread=spread, **settings)  # type: ignore[arg-type]


def train(posterior: BBB, steps: int) -> None:
    x, y = batch()
    for _ in range(steps):
        posterior.step(lambda net: F.cross_entropy(net(x), y))


def alphas(posterior: BBB) -> dict[str, Tensor]:
    """α of each weight, worked out from ρ by hand."""
    names, shapes = posterior.layout.names, posterior.layout.shapes
    rho, found, at = posterior.rho.detach(), {}, 0
    for index, name in enumerate(names):
        size = shapes[name].numel()
        piece = rho[at : at + size].view(shapes[name]) if len(rho) > len(names) else rho[index].expand(shapes[name])
        found[name], at = piece.exp(), at + size
    return found


@FORMS
def test_the_variance_is_alpha_times_the_squared_mean(spread: str) -> None:
    posterior = make(spread)
    assert len(posterior.rho) == (4 if spread == "relative-layer" else 43)
    train(posterior, 3)
    mean, std, alpha = posterior.mean(), posterior.std(), alphas(posterior)
    for name in mean:
        torch.testing.assert_close(std[name].square(), alpha[name] * mean[name].square())
    # Draws have these moments: 5,000 of 43 weights; a mean off by 6 standard errors comes once in 10⁷ runs.
    with torch.no_grad():
        draws = torch.stack([posterior.layout.flatten(posterior.draw()) for _ in range(5_000)])
    flat_mean, flat_std = (posterior.layout.flatten(values) for values in (mean, std))
    assert ((draws.mean(0) - flat_mean).abs() / flat_std).max() < 6 / math.sqrt(5_000)
    assert (draws.std(0) / flat_std - 1).abs().max() < 6 / math.sqrt(2 * 5_000)


@FORMS
@pytest.mark.parametrize("kl", ["closed", "ard"])
def test_the_kl_and_its_monte_carlo_mean(spread: str, kl: str) -> None:
    posterior = make(spread, kl_term=kl, prior=None if kl == "ard" else 0.3)
    mean, std = (posterior.layout.flatten(values) for values in (posterior.mean(), posterior.std()))
    prior_std = (mean.square() + std.square()).sqrt() if kl == "ard" else torch.full_like(mean, 0.3)
    q, p = D.Normal(mean, std), D.Normal(torch.zeros_like(mean), prior_std)
    assert posterior.kl().item() == pytest.approx(float(D.kl_divergence(q, p).sum()), rel=1e-9)
    torch.manual_seed(1)
    w = q.sample((40_000,))
    each = (q.log_prob(w) - p.log_prob(w)).sum(-1)
    # Five standard errors: a false alarm in two million runs.
    assert abs(float(each.mean()) - posterior.kl().item()) < 5 * float(each.std()) / 200


def test_the_fitted_prior_is_the_best_one_and_depends_on_alpha_alone() -> None:
    mean, std = torch.tensor([0.3, -2.0, 1e-3]).double(), torch.tensor([0.1, 0.5, 0.2]).double()
    for index in range(3):
        best = float(ard_kl(mean[index], std[index]))
        grid = torch.logspace(-3, 2, 20_001).double()
        every = D.kl_divergence(D.Normal(mean[index], std[index]), D.Normal(torch.zeros(()).double(), grid))
        assert best == pytest.approx(float(every.min()), abs=1e-6)
    alpha = torch.tensor([1e-4, 0.5, 30.0]).double()
    for scale in (0.01, 7.0):
        kl = ard_kl(scale * mean, scale * mean.abs() * alpha.sqrt())
        assert float(kl) == pytest.approx(0.5 * float(torch.log1p(1 / alpha).sum()))


@FORMS
@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
@pytest.mark.parametrize("kl", ["auto", "monte-carlo", "ard"])
def test_a_step_follows_the_gradient_that_autograd_finds(spread: str, noise: str, kl: str) -> None:
    """One step of SGD against finite differences of the same objective, noise held still by the generator's state."""
    posterior = make(spread, noise=noise, kl_term=kl, lr=1.0, temperature=3.0)
    x, y = batch()

    def objective(one: BBB) -> float:
        terms = copy.deepcopy(one).step(lambda net: F.cross_entropy(net(x), y))
        return terms.loss

    moved = copy.deepcopy(posterior)
    moved.step(lambda net: F.cross_entropy(net(x), y))
    for name in ("0.weight", "2.bias", "rho"):
        before, after = (one.rho if name == "rho" else one.model.get_parameter(name) for one in (posterior, moved))
        slopes = (before - after).detach().flatten()
        for index in range(0, slopes.numel(), max(1, slopes.numel() // 3)):
            values = []
            for change in (1e-5, -1e-5):
                other = copy.deepcopy(posterior)
                place = other.rho if name == "rho" else other.model.get_parameter(name)
                with torch.no_grad():
                    place.view(-1)[index] += change
                values.append(objective(other))
            assert float(slopes[index]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=2e-4, abs=1e-8)


def test_local_reparameterisation_has_the_variance_of_weight_draws() -> None:
    layer = nn.Linear(3, 2).double()
    posterior = BBB(layer, data_size=1, spread="relative", init={"relative_std": 0.5}, noise="lrt", lr=0.0)
    x = torch.tensor([[1.0, -2.0, 0.5]]).double()
    outputs: list[Tensor] = []

    def nll(net: nn.Module) -> Tensor:
        outputs.append(net(x.expand(20_000, 3)))
        return outputs[-1].mean()

    posterior.step(nll)
    expected = 0.25 * (x.square() @ layer.weight.square().T + layer.bias.square())
    # A variance of 20,000 numbers is within 6·√(2/20,000) of itself but once in 10⁸.
    assert (outputs[0].var(0) / expected - 1).abs().max() < 0.06


def test_a_mean_of_zero_stays_finite() -> None:
    net = network()
    nn.init.zeros_(net[0].bias)
    posterior = BBB(net, data_size=10, spread="relative", lr=0.01)
    train(posterior, 2)
    assert math.isfinite(posterior.kl().item())
    assert all(bool(torch.isfinite(p).all()) for p in posterior.parameters())


@FORMS
@pytest.mark.parametrize("size", [0.0, 1e-8, 1e-7, 1.4e-6])
def test_relevance_does_not_depend_on_means(spread: str, size: float) -> None:
    """½ log(1 + 1/α) has no derivative by μ, also where a mean is nearly zero; by log α it is −½/(1 + α)."""
    posterior = make(spread, kl_term="ard", init={"rho": -10.0}, data_size=1)
    nn.init.constant_(posterior.model[0].bias, size)  # type: ignore[index]
    silent = lambda net: 0.0 * net(batch()[0]).sum()  # noqa: E731 - no derivative but the KL's
    with posterior.prepared(silent):
        grads = {name: p.grad for name, p in posterior.model.named_parameters()}
        assert all(grad is None or not grad.any() for grad in grads.values())
        counts = torch.tensor(posterior.layout.sizes if spread == "relative-layer" else [1] * 43).double()
        torch.testing.assert_close(posterior.rho.grad, -0.5 * counts / (1 + math.exp(-10.0)))
    assert posterior.kl().item() == pytest.approx(43 * 0.5 * math.log1p(math.exp(10.0)))


@FORMS
def test_where_alpha_starts(spread: str) -> None:
    assert set(make(spread, init={"rho": None}).rho.tolist()) == {-10.0}
    assert make(spread, init={"rho": None, "relative_std": 0.2}).rho.tolist()[0] == pytest.approx(math.log(0.04))
    with pytest.raises(ValueError, match="σ follows from μ"):
        make(spread, init={"rho": None, "std": 0.1})
    with pytest.raises(ValueError, match="exclude each other"):
        make(spread, init={"relative_std": 0.1, "rho": -2.0})


def test_impossible_choices() -> None:
    with pytest.raises(ValueError, match="Did you mean 'relative'"):
        make("relativ")
    with pytest.raises(ValueError, match="kl_term='ard' fits a prior"):
        make("free", kl_term="ard", prior=1.0)


@FORMS
def test_files_pruning_and_counts(spread: str, tmp_path: Path) -> None:
    posterior = make(spread, kl_term="ard", noise="lrt")
    train(posterior, 2)
    count = 4 if spread == "relative-layer" else 43
    assert parameter_counts(posterior) == {"network": 43, "trained": 43 + count, "needed": 43 + count}
    prune(posterior, rate=0.5)
    train(posterior, 2)
    with torch.no_grad():
        draw = posterior.draw()
    assert all(bool((draw[name][~mask] == 0).all()) for name, mask in posterior.masks().items())
    credo.save(posterior, tmp_path / "a.safetensors")
    again = credo.load(tmp_path / "a.safetensors", model=network())
    x, _ = batch()
    assert torch.equal(credo.predict(again, x).probs, credo.predict(posterior, x).probs)
    assert {**again.config(), "random": ()} == {**posterior.config(), "random": ()}


def test_the_smaller_network_predicts_the_same() -> None:
    posterior = make("relative")
    prune(posterior, rate=0.4, structure="units")
    smaller = compact(posterior)
    assert sum(p.numel() for p in smaller.model.parameters()) < 43
    x, _ = batch()
    wanted, found = (credo.predict(p, x, draws=4000, seed=1).probs for p in (posterior, smaller))
    # Averages of 4,000 draws with a spread below 0.1: apart by 0.01 once in 10⁵ runs.
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0)
