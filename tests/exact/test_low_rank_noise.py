"""Low-rank noise: its width against the closed form, isotropic products, and what a search leaves alone."""

from functools import partial
from operator import ge
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.methods.noise_directions import adapter_factors, basis_of, largest_width

INPUTS, OUTPUTS, RANK, ROWS, NOISE = 60, 12, 4, 64, 0.5


def adapted(*, trained: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net = credo.lora(nn.Sequential(nn.Linear(INPUTS, OUTPUTS)), rank=RANK, alpha=2.0 * RANK, target="0")
    if trained:
        nn.init.normal_(net.get_parameter("0.lora_b.weight"), std=0.3)
    return net


def rows() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = adapted()(x)
    return [(x[:40], y[:40]), (x[40:], y[40:])]


def made(net: nn.Module, **options: Any) -> credo.LowRankNoise:
    noise = credo.likelihoods.GaussianNoise(NOISE)
    return credo.LowRankNoise(net, data_size=ROWS, likelihood=noise, **options)


def test_bisection_finds_the_largest_width() -> None:
    for wanted in (3e-7, 0.00123, 0.01, 7.7, 900.0):
        found = largest_width(partial(ge, wanted))
        assert wanted / 1.01 < found <= wanted
    assert largest_width(lambda _: False) == 0.0
    assert largest_width(lambda _: True) > 1e3


@pytest.mark.parametrize("tolerance", [0.01, 0.5])
def test_the_width_is_that_of_the_closed_form(tolerance: float) -> None:
    """Outputs get the noise 2·β·U·E·x, so that the loss is on average 4·β²·rank·|x|²/(2·noise²) above the mean's."""
    data = rows()
    posterior = made(adapted(), tolerance=tolerance).fit(data)
    squares = torch.cat([x for x, _ in data]).square().sum(1).mean()
    expected = (tolerance * 2 * NOISE**2 / (4 * RANK * squares)).sqrt()
    torch.testing.assert_close(posterior.width.float(), expected, rtol=0.08, atol=0.0)


def test_draws_are_isotropic_in_the_columns_of_b() -> None:
    posterior = made(adapted()).fit(rows())
    b, a = (posterior.model.get_parameter(f"0.lora_{one}.weight").detach() for one in "ba")
    u = torch.linalg.svd(b, full_matrices=False)[0]
    draws = torch.stack([posterior.draw()["0.lora_a.weight"] for _ in range(200)])
    noise = b @ (draws - a) / posterior.width.float()
    inside = u.T @ noise
    torch.testing.assert_close(u @ inside, noise, rtol=1e-3, atol=1e-4)
    flat = inside.transpose(0, 1).flatten(1)  # [rank, draws·inputs]
    torch.testing.assert_close(flat @ flat.T / flat.shape[1], torch.eye(RANK), rtol=0.0, atol=0.05)
    torch.testing.assert_close(draws.std(0).mean(1), posterior.std()["0.lora_a.weight"][:, 0], rtol=0.05, atol=0.0)


def test_matrices_without_adapters_get_noise_in_their_first_singular_vectors() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 6, 2), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(20, 3, 3), torch.arange(20) % 2
    posterior = credo.LowRankNoise(net, data_size=20, directions=2).fit([(x, y)])
    u = torch.linalg.svd(net[0].weight.detach().flatten(1))[0][:, :2]
    noise = (posterior.draw()["0.weight"] - net[0].weight.detach()).flatten(1)
    torch.testing.assert_close(u @ u.T @ noise, noise, rtol=1e-3, atol=1e-5)
    assert set(posterior.draw()) == {"0.weight", "2.weight"}


def test_a_step_drops_the_width_and_a_training_finds_it_again() -> None:
    data = rows()
    posterior = made(adapted()).fit(data)
    assert posterior.is_random
    posterior.step(lambda net: (net(data[0][0]) - data[0][1] + 1).square().mean())
    assert not posterior.is_random
    assert posterior.draw() == {}
    credo.fit(posterior, data, epochs=1)
    assert posterior.is_random


def test_untrained_adapters_have_no_noise() -> None:
    """With B = 0 outputs do not depend on A: there is no scale at which to stop."""
    posterior = made(adapted(trained=False)).fit(rows())
    assert not posterior.is_random


def test_rows_of_a_that_b_does_not_read_have_no_noise() -> None:
    b = torch.zeros(5, 3)
    b[:, 0] = 2.0
    basis = basis_of(torch.ones(3, 4), b, 8)
    expected = torch.zeros(3, 3)
    expected[0, 0] = 1 / (2.0 * 5**0.5)
    torch.testing.assert_close((basis @ basis.T).sqrt(), expected)


def test_adapters_of_peft_are_known_by_their_names() -> None:
    net = nn.Module()
    net.lora_A, net.lora_B = (nn.ModuleDict({"default": nn.Linear(*sizes)}) for sizes in ((4, 2), (2, 4)))
    assert adapter_factors(net)["lora_A.default.weight"] == "lora_B.default.weight"


def test_wrong_arguments_and_networks() -> None:
    with pytest.raises(ValueError, match="tolerance=0 must be a positive number of nats"):
        made(adapted(), tolerance=0)
    with pytest.raises(credo.UnsupportedModelError, match="no trainable weight matrix"):
        made(adapted(), random=["*lora_b*"])
    with pytest.raises(ValueError, match="The loader has no batches"):
        made(adapted()).fit([])
    bad = rows()
    bad[0][1][0, 0] = float("nan")
    with pytest.raises(credo.NonFiniteError, match="The loss at the mean is nan"):
        made(adapted()).fit(bad)
