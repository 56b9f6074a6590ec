"""Defects found in other libraries, each as a test that Credo does not have it."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

from credo.core.likelihood import GaussianNoise
from credo.core.prior import Gaussian
from credo.methods import BBB, MAP

NOISES = pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def closed_form(posterior: BBB) -> float:
    mean, std = posterior.mean(), posterior.std()
    return sum(D.kl_divergence(D.Normal(mean[n], std[n]), D.Normal(0.0, 1.0)).sum().item() for n in mean)


# -- optimisers that perturb weights in place -------------------------------------------------------------------


@NOISES
def test_an_exception_in_the_middle_of_a_step_leaves_no_noise_in_the_weights(noise: str) -> None:
    posterior = BBB(mlp(), data_size=8, noise=noise, init=1.0)
    before = copy.deepcopy(posterior.model.state_dict())

    def nll(net: nn.Module) -> Tensor:
        net(data()[0])
        raise MemoryError

    with pytest.raises(MemoryError):
        posterior.step(nll)
    assert all(torch.equal(value, before[key]) for key, value in posterior.model.state_dict().items())


@NOISES
def test_a_parameter_without_gradient_does_not_break_the_step(noise: str) -> None:
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    x, y = data()
    for posterior in (BBB(model, data_size=8, noise=noise), MAP(copy.deepcopy(model), data_size=8)):
        assert math.isfinite(posterior.step(lambda net: F.cross_entropy(net(x), y)).loss)


@NOISES
def test_dropout_and_shuffling_of_the_user_keep_their_random_numbers(noise: str) -> None:
    x, y = data()
    posterior = BBB(mlp(), data_size=8, noise=noise)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    got = []
    for _ in range(4):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
        got.append(torch.rand(1))
    assert torch.equal(torch.cat(got), expected)


@pytest.mark.parametrize("method", [MAP, BBB])
def test_regression_is_possible(method: type) -> None:
    x = torch.linspace(-1, 1, 50).unsqueeze(1)
    y = 3 * x - 1
    torch.manual_seed(0)
    posterior = method(nn.Linear(1, 1), data_size=50, lr=0.05, likelihood=GaussianNoise(0.1))
    for _ in range(300):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    assert posterior.model.weight.item() == pytest.approx(3.0, abs=0.15)
    assert posterior.model.bias.item() == pytest.approx(-1.0, abs=0.15)


# -- layer-swapping libraries: scale and value of the KL --------------------------------------------------------


def test_the_kl_of_a_large_layer_is_ten_thousand_times_that_of_a_small_one() -> None:
    kls = []
    for width in (10, 1000):
        layer = nn.Linear(width, width, bias=False)
        nn.init.zeros_(layer.weight)
        kls.append(BBB(layer, data_size=1, init=0.1).kl().item())
    assert kls[1] / kls[0] == pytest.approx(10_000, rel=1e-4)


def test_the_kl_is_not_divided_by_the_number_of_layers() -> None:
    def stack(layers: int) -> float:
        network = nn.Sequential(*[nn.Linear(5, 5) for _ in range(layers)])
        for parameter in network.parameters():
            nn.init.constant_(parameter, 0.3)
        return BBB(network, data_size=1, init=0.1).kl().item()

    assert stack(4) == pytest.approx(4 * stack(1), rel=1e-5)


def test_the_kl_goes_from_posterior_to_prior() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    posterior = BBB(layer, data_size=1, prior=2.0, init=0.5)
    q, p = D.Normal(0.0, 0.5), D.Normal(0.0, 2.0)
    assert posterior.kl().item() == pytest.approx(float(D.kl_divergence(q, p)), rel=1e-5)
    assert abs(float(D.kl_divergence(q, p)) - float(D.kl_divergence(p, q))) > 1


def test_the_priors_std_is_a_standard_deviation_not_a_variance() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    assert BBB(layer, data_size=1, prior=0.1, init=0.1).kl().item() == pytest.approx(0.0, abs=1e-6)


def test_the_monte_carlo_kl_has_no_spurious_half_per_weight() -> None:
    layer = nn.Linear(400, 400, bias=False)
    nn.init.zeros_(layer.weight)
    posterior = BBB(layer, data_size=1, prior=0.1, init=0.1, kl_term="monte-carlo")
    # Posterior and prior are equal, so log q − log p is 0 for every draw; a spurious ½ would give 80 000.
    assert abs(posterior.kl().item()) < 1.0


def test_the_objective_is_the_elbo_per_example() -> None:
    x, y = data()
    posterior = BBB(mlp(), data_size=1000)
    kl = posterior.kl().item()
    terms = posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert terms.loss - terms.nll == pytest.approx(kl / 1000, rel=1e-4)


# -- layer-swapping libraries: what is converted -----------------------------------------------------------------


def test_an_lstm_is_wholly_random_and_its_kl_counted_once() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    posterior = BBB(lstm, data_size=1, init=0.1)
    assert sum(w.numel() for w in posterior.draw().values()) == sum(p.numel() for p in lstm.parameters())
    assert posterior.kl().item() == pytest.approx(closed_form(posterior), rel=1e-5)


def test_an_lstm_has_one_draw_for_the_whole_sequence() -> None:
    torch.manual_seed(0)
    posterior = BBB(nn.LSTM(3, 4), data_size=1, init=0.5)
    draw, x = posterior.draw(), torch.randn(6, 2, 3)
    with posterior.sampled(draw) as net:
        out, _ = net(x)
    cell = nn.LSTMCell(3, 4)
    cell.load_state_dict({key.removesuffix("_l0"): value.detach() for key, value in draw.items()})
    state = None
    for step in range(6):
        state = cell(x[step], state)
        torch.testing.assert_close(out[step], state[0])


def test_tied_weights_are_drawn_and_counted_once() -> None:
    network = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    network[1].weight = network[0].weight
    posterior = BBB(network, data_size=1, init=0.3)
    assert list(posterior.draw()) == ["0.weight"]
    assert posterior.kl().item() == pytest.approx(closed_form(posterior), rel=1e-5)
    with posterior.sampled() as net:
        assert net[0].weight is net[1].weight


def test_nested_modules_are_sampled() -> None:
    network = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 3))), nn.ModuleDict({"a": nn.Linear(3, 3)})["a"])
    posterior = BBB(network, data_size=1, init=0.3)
    first, second = posterior.draw(), posterior.draw()
    assert set(first) == {name for name, _ in network.named_parameters()}
    assert all((first[name] != second[name]).all() for name in first)


@NOISES
def test_a_transformer_layer_is_not_confused_by_its_inner_linear_subclass(noise: str) -> None:
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    posterior = BBB(network, data_size=8, noise=noise, lr=0.01)
    before = {name: std.clone() for name, std in posterior.std().items()}
    x = torch.randn(2, 3, 4)
    posterior.step(lambda net: net(x).square().mean())
    moved = {name for name, std in posterior.std().items() if not torch.equal(std, before[name])}
    assert "self_attn.out_proj.weight" in moved
    assert moved == set(before)


@NOISES
def test_dtype_and_padding_mode_are_kept(noise: str) -> None:
    torch.manual_seed(0)
    network = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    expected = network(x).square().mean().item()
    posterior = BBB(network, data_size=2, noise=noise, init={"rho": -200.0}, lr=0.0)
    assert posterior(x).dtype == torch.float64
    assert posterior.step(lambda net: net(x).square().mean()).nll == pytest.approx(expected, rel=1e-12)


@NOISES
def test_flipout_and_its_kin_add_noise_around_the_mean_not_a_second_copy_of_it(noise: str) -> None:
    x, y = data()
    network = mlp().double()
    expected = F.cross_entropy(network(x.double()), y).item()
    posterior = BBB(network, data_size=8, noise=noise, init={"rho": -200.0}, lr=0.0)
    assert posterior.step(lambda net: F.cross_entropy(net(x.double()), y)).nll == pytest.approx(expected, rel=1e-12)


# -- priors, saving, batch norm -----------------------------------------------------------------------------------


def test_a_prior_centred_on_the_networks_weights_does_not_move_with_them() -> None:
    model = mlp()
    start = torch.cat([p.detach().clone().reshape(-1) for p in model.parameters()])
    posterior = BBB(model, data_size=8, prior=Gaussian(mean=dict(model.named_parameters()), std=0.1), lr=0.1)
    x, y = data()
    for _ in range(3):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert torch.equal(posterior.prior.mean, start)
    assert not torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), start)


def test_the_prior_is_saved() -> None:
    model = mlp()
    posterior = BBB(model, data_size=8, prior=Gaussian(mean=dict(model.named_parameters()), std={"*": 0.1}))
    file = io.BytesIO()
    torch.save(posterior.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert torch.equal(state["prior.mean_vector"], posterior.prior.mean)
    assert BBB(mlp(), data_size=8, prior=0.1).config()["prior"] == {"kind": "gaussian", "mean": 0.0, "std": 0.1}


def test_resuming_continues_the_optimisers_own_step_count() -> None:
    x, y = data()

    def make(steps: int, state: dict | None = None) -> BBB:
        posterior = BBB(mlp(), data_size=8, lr=0.01)
        if state:
            posterior.load_state_dict(state)
        for _ in range(steps):
            posterior.step(lambda net: F.cross_entropy(net(x), y))
        return posterior

    # A bias correction that restarts would make the first resumed step several times too long.
    whole, resumed = make(6), make(1, copy.deepcopy(make(5).state_dict()))
    assert torch.equal(whole.rho, resumed.rho)


@NOISES
def test_batch_norm_in_training_mode_works_with_several_draws(noise: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    posterior = BBB(network, data_size=8, noise=noise, draws=3)
    x, y = torch.randn(8, 1, 4, 4), data()[1]
    assert math.isfinite(posterior.step(lambda net: F.cross_entropy(net(x), y)).loss)
    assert network[1].num_batches_tracked == 1
