"""Bayes by Backprop: what a draw is and what a step does."""

import math

import pytest
import torch
from bbb_outputs import seen_in_training
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.network.layer_hooks import hooked
from credo.core.network.substitute import substituted
from credo.core.prior import ScaleMixture
from credo.methods import BBB
from credo.methods.bbb.activation_noise import NOISES

ACTIVATION = pytest.mark.parametrize("noise", ["lrt", "flipout"])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 3, generator=generator, dtype=torch.float64), torch.randint(2, (10,), generator=generator)


# -- draws ------------------------------------------------------------------------------------------------------


def test_draws_are_normal_with_mean_and_std_of_each_weight() -> None:
    posterior = BBB(mlp(), data_size=10, init={"rho": (-1.0, 1.0)})
    mean, std = posterior.mean(), posterior.std()
    z = [((draw[n] - mean[n]) / std[n]).reshape(-1) for draw in posterior.iter_draws(200) for n in mean]
    # Kolmogorov-Smirnov over 5 200 values at p = 1e-4.
    assert stats.kstest(torch.cat(z).detach().numpy(), "norm").pvalue > 1e-4


def test_only_the_chosen_parameters_are_random_but_all_are_trained() -> None:
    net, (x, y) = mlp(), data()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    posterior = BBB(net, data_size=10, random="last", lr=0.1)
    assert set(posterior.draw()) == set(posterior.std()) == set(posterior.mean()) == {"2.weight", "2.bias"}
    assert posterior.rho.numel() == 10
    posterior.step(lambda n: F.cross_entropy(n(x), y))
    assert not any(torch.equal(p, before[name]) for name, p in net.named_parameters())


@ACTIVATION
def test_prediction_draws_weights_whatever_the_training_noise(noise: str) -> None:
    x = data()[0][:1].repeat(2, 1)
    posterior = BBB(mlp(), data_size=10, noise=noise, init=0.5, lr=0.0)
    for _ in range(3):
        out = posterior(x)
        assert torch.equal(out[0], out[1])  # one network for the whole batch
    trained = seen_in_training(posterior, x, 3)
    assert not torch.equal(trained[0, 0], trained[0, 1])  # noise of its own for each example


# -- steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
def test_a_step_averages_its_draws(noise: str) -> None:
    (x, y), values = data(), []

    def nll(net: nn.Module) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        values.append(loss.item())
        return loss

    terms = BBB(mlp(), data_size=10, noise=noise, draws=5, init=0.5).step(nll)
    assert len(set(values)) == 5
    assert terms.nll == pytest.approx(sum(values) / 5, rel=1e-12)


def test_the_gradient_is_that_of_the_objective_at_its_draw() -> None:
    (x, y), net = data(), mlp()
    posterior = BBB(net, data_size=50, temperature=0.7, prior=0.5, init=0.3, optimizer="sgd", lr=1.0)
    other = BBB(mlp(), data_size=50, prior=0.5, init=0.3)  # same seed: the same draw
    mean, rho = other.layout.flatten(dict(other.model.named_parameters())).detach(), other.rho.detach()
    mean.requires_grad_()
    rho.requires_grad_()
    eps = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    std = F.softplus(rho)
    w = other.layout.split(mean + std * eps)
    logits = torch.tanh(x @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), torch.distributions.Normal(0.0, 0.5))
    loss = F.cross_entropy(logits, y) + 0.7 / 50 * kl.sum()
    mean_gradient, rho_gradient = torch.autograd.grad(loss, (mean, rho))
    terms = posterior.step(lambda n: F.cross_entropy(n(x), y))
    assert terms.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(posterior.layout.flatten(dict(net.named_parameters())), mean - mean_gradient)
    torch.testing.assert_close(posterior.rho, rho - rho_gradient)


class Scale(nn.Module):
    """A layer of no known type: takes weight draws beside others that take activation noise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


@ACTIVATION
def test_the_gradient_under_activation_noise_is_that_of_the_objective_by_autograd(noise: str) -> None:
    def network() -> nn.Sequential:
        net = mlp()
        net[1] = Scale()
        return net

    (x, y), net = data(), network()
    options = {"data_size": 50, "prior": 0.5, "init": 0.3, "noise": noise, "draws": 2}
    posterior = BBB(net, optimizer="sgd", lr=1.0, **options)
    plain = BBB(network(), **options)
    mean, std = plain.layout.flatten(dict(plain.model.named_parameters())), F.softplus(plain.rho)
    generator, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(2):
        eps = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        drawn = {"1.scale": plain.layout.split(mean + std * eps)["1.scale"]}
        layers = {path: plain.model.get_submodule(path) for path in ("0", "2")}
        noisy = hooked(layers, NOISES[noise](plain.layout.split(std), generator))
        with substituted(plain.model, drawn), noisy:
            total = total + F.cross_entropy(plain.model(x), y) / 2
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), torch.distributions.Normal(0.0, 0.5))
    (total + kl.sum() / 50).backward()
    posterior.step(lambda n: F.cross_entropy(n(x), y))
    for ours, theirs in zip(posterior.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - theirs.grad)


def test_the_monte_carlo_kl_of_a_step_is_taken_at_the_draws_the_network_saw() -> None:
    (x, y), weights = data(), []
    posterior = BBB(mlp(), data_size=10, prior=ScaleMixture(), init=0.3, draws=2)
    mean, std = (posterior.layout.flatten(values) for values in (posterior.mean(), posterior.std()))

    def nll(net: nn.Module) -> Tensor:
        weights.append(posterior.layout.flatten(dict(net.named_parameters())).detach())
        return F.cross_entropy(net(x), y)

    kl = posterior.step(nll).kl
    q = torch.distributions.Normal(mean, std)
    expected = [(q.log_prob(w).sum() - ScaleMixture().log_prob(w)).item() for w in weights]
    assert kl == pytest.approx(sum(expected) / 2, rel=1e-9)


def test_temperature_zero_leaves_the_kl_out_but_reports_it() -> None:
    x, y = data()
    terms = BBB(mlp(), data_size=10, temperature=0.0).step(lambda n: F.cross_entropy(n(x), y))
    assert (terms.penalty, terms.loss) == (0.0, terms.nll)
    assert terms.kl > 0


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise": "flip-out"}, "Did you mean 'flipout'"),
        ({"noise": {"steps": 3}}, "noise={'steps': 3} has no kind"),
        ({"noise": {"kind": "lrtt"}}, "Unknown noise 'lrtt'. Did you mean 'lrt'"),
        ({"noise": {"kind": "adversarial", "step": 2}}, "Unknown option of the noise adversarial 'step'. Did you mean"),
        ({"kl_term": "montecarlo"}, "Did you mean 'monte-carlo'"),
        ({"kl_term": "closed", "prior": {"kind": "scale-mixture"}}, "ScaleMixture has no closed-form KL"),
        ({"draws": 0}, "draws=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"random": "nothing"}, "nothing"),
        ({"kl_term": {"weight": "blundell"}}, "needs batches"),
        ({"optimizer": "adamm"}, "Did you mean 'adam"),
    ],
)
def test_bad_choices_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BBB(mlp(), data_size=10, **options)


def test_a_weight_whose_gradient_is_infinite_is_named_and_its_std_by_it() -> None:
    x, y = data()

    def nll(net: nn.Module) -> Tensor:
        net[0].bias.register_hook(lambda g: torch.full_like(g, math.inf))
        return F.cross_entropy(net(x), y)

    posterior = BBB(mlp(), data_size=10)
    with pytest.raises(ArithmeticError, match=r"The gradient of 0\.bias is not finite at step 0"):
        posterior.step(nll)
    gradient = torch.zeros_like(posterior.rho)
    gradient[-1] = math.inf
    assert posterior._locate("rho", gradient) == f"the std of {posterior.layout.names[-1]}"
