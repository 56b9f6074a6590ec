"""Rows whose network outputs are not finite: refused by name, or marked; the other rows are what they are alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.likelihood import Likelihood
from credo.predict import predict

METHODS = ("map", "bbb", "ivon")


def posterior_of(method: str, network: nn.Module, likelihood: str | Likelihood = "categorical") -> credo.Posterior:
    made: credo.Posterior = credo.METHODS[method](network, data_size=50, likelihood=likelihood)
    return made


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_inputs_are_refused_by_their_numbers_over_all_batches(
    method: str, value: float, x: Tensor, mlp: Callable[..., nn.Module]
) -> None:
    x[[7, 19], 1] = value
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(credo.NonFiniteError, match=r"2 of 23 rows .* inputs of rows 7, 19 are NaN or infinite already"):
        predict(posterior_of(method, network), x, draws=4, batch_size=5)


def test_finite_inputs_that_overflow_are_refused_as_such() -> None:
    x = torch.ones(6, 3)
    x[4] = 3e38
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.init.ones_(network[0].weight)
    with pytest.raises(credo.NonFiniteError, match=r"1 of 6 rows .* The inputs of row 4 are finite, .* overflow"):
        predict(credo.MAP(network, data_size=10), x)


def test_weights_that_are_nan_are_not_blamed_on_the_inputs(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    network = mlp()
    with torch.no_grad():
        network.get_parameter("2.bias")[1] = torch.nan
    x[3] = torch.inf
    with pytest.raises(credo.NonFiniteError) as caught:
        predict(credo.MAP(network, data_size=10), x)
    assert "23 of 23 rows" in str(caught.value)
    assert "The inputs of row 3 are NaN" in str(caught.value)
    assert "The inputs of rows 0, 1, 2, 4, 5 and 17 more are finite" in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_marked_rows_are_nan_and_the_others_what_they_are_without_them(
    method: str, x: Tensor, y: Tensor, mlp: Callable[..., nn.Module]
) -> None:
    whole = predict(posterior_of(method, mlp()), [(x, y)], draws=8, on_nonfinite="mark")
    assert whole.finite.all()
    broken = x.clone()
    broken[[4, 20]] = torch.nan
    found = predict(posterior_of(method, mlp()), [(broken, y)], draws=8, on_nonfinite="mark")
    assert (~found.finite).nonzero().flatten().tolist() == [4, 20]
    assert found.labels[[4, 20]].tolist() == [-1, -1]
    for name in ("probs", "confidence", "total", "epistemic", "mutual_information", "log_likelihood"):
        assert getattr(found, name)[[4, 20]].isnan().all(), name
        torch.testing.assert_close(getattr(found, name)[found.finite], getattr(whole, name)[found.finite])
    assert torch.equal(found.labels[found.finite], whole.labels[found.finite])
    with pytest.raises(ValueError, match="2 of 23 rows have no prediction"):
        credo.measure(found)


def test_marked_rows_of_a_regression(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    x[5] = torch.nan
    posterior = posterior_of("bbb", mlp(3, 2), credo.GaussianNoise(0.1))
    found = predict(posterior, [(x, torch.zeros(23, 2))], draws=4, on_nonfinite="mark")
    assert (~found.finite).nonzero().flatten().tolist() == [5]
    for name in ("mean", "aleatoric", "epistemic", "total", "log_likelihood"):
        assert getattr(found, name)[5].isnan().all(), name
        assert getattr(found, name)[found.finite].isfinite().all(), name


def test_adaptive_draws_do_not_go_on_for_rows_without_an_answer(bbb: credo.BBB, x: Tensor) -> None:
    x[2] = torch.nan
    found = predict(bbb, x, draws=2000, tolerance=1e-2, on_nonfinite="mark")
    assert int(found.draws_used[2]) == 10
    assert found.draws_used[found.finite].min() > 10


def test_a_masked_class_is_an_answer(x: Tensor) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs).masked_fill(torch.tensor([False, True, False, False]), -torch.inf)

    found = predict(credo.BBB(Masked(), data_size=10), x, draws=4)
    assert found.finite.all()
    assert (found.probs[:, 1] == 0).all()


def test_infinite_log_odds_are_no_certainty() -> None:
    network = nn.Linear(1, 1)
    nn.init.constant_(network.weight, 1e20)
    x = torch.tensor([[0.0], [1e30]])
    with pytest.raises(credo.NonFiniteError, match="row 1 are finite"):
        predict(credo.MAP(network, data_size=10, likelihood="bernoulli"), x)


def test_a_choice_that_does_not_exist(bbb: credo.BBB, x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"on_nonfinite 'ignore'\. Possible: mark, raise"):
        predict(bbb, x, on_nonfinite="ignore")
