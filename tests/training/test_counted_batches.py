"""Training tells the method what each batch's loss is a mean over: the likelihood knows, or functions of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.example_counts import Counted
from credo.core.likelihood import Categorical

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(2, (24,), generator=torch.Generator().manual_seed(1))
COUNTS = torch.rand(24, generator=torch.Generator().manual_seed(2)) < 0.5
MASKED = list(zip(X.split(6), Y.where(COUNTS, -100).split(6), strict=True))
SOME = [(x[y >= 0], y[y >= 0]) for x, y in MASKED]


class WithGaps(Categorical):
    """Labels of -100 are not known."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y)

    def counted(self, y: Tensor) -> Counted:
        return Counted(float((y >= 0).sum()))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def trained(loader: Any, likelihood: Any = None, method: Any = credo.OGN, **options: Any) -> dict[str, Tensor]:
    posterior = method(network(), data_size=int(COUNTS.sum()), likelihood=likelihood)
    credo.fit(posterior, loader, epochs=2, **options)
    return {n: v for n, v in posterior.state_dict().items() if isinstance(v, Tensor) and v.is_floating_point()}


def loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


@pytest.mark.parametrize("method", [credo.OGN, credo.KFAC])
def test_a_likelihood_that_leaves_rows_out_says_so_by_itself(method: Any) -> None:
    assert {len(x) for x, _ in SOME} != {6}
    wanted = trained(SOME, method=method)
    for name, value in trained(MASKED, WithGaps(), method).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"examples": lambda batch: (batch[1] >= 0).sum()},
        {"weights": lambda batch: batch[1] >= 0},
        {"examples": lambda batch: (batch[1] >= 0).sum(), "weights": lambda batch: batch[1] >= 0},
    ],
)
def test_a_loss_of_ones_own_says_it_by_functions_of_the_batch(options: dict[str, Any]) -> None:
    wanted = trained(SOME)
    for name, value in trained(MASKED, nll=loss, **options).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::credo.DataSizeWarning")
def test_a_loss_of_ones_own_is_not_counted_as_the_likelihood_would() -> None:
    whole = list(zip(X.split(6), Y.split(6), strict=True))
    wanted = trained(whole)
    for name, value in trained(whole, WithGaps(), nll=loss).items():
        assert torch.equal(value, wanted[name])


def test_methods_that_need_no_count_take_it() -> None:
    wanted = trained(SOME, method=credo.MAP)
    for name, value in trained(MASKED, WithGaps(), credo.MAP).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


def test_a_data_size_of_labelled_rows_is_no_reason_to_warn() -> None:
    y = Y.where(torch.arange(24) < 8, -100)
    loader = DataLoader(TensorDataset(X, y), batch_size=24)
    for likelihood, options in (
        (WithGaps(), {}),
        (None, {"nll": loss, "examples": lambda batch: (batch[1] >= 0).sum()}),
    ):
        posterior = credo.OGN(network(), data_size=8, likelihood=likelihood)
        credo.fit(posterior, loader, epochs=1, **options)  # warnings are errors here
    with pytest.warns(credo.DataSizeWarning, match="data_size=2"):
        credo.fit(credo.MAP(network(), data_size=2, prior=1.0), loader, epochs=1, nll=loss)


def after_one_step(method: type[credo.Posterior], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    posterior = method(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), data_size=12)
    counted = posterior.likelihood.counted(y)
    posterior.step(lambda net: posterior.likelihood.nll(net(x), y), **counted.given())
    return {name: value for name, value in posterior.state_dict().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN])
@pytest.mark.parametrize("partly", [False, True], ids=["whole", "partly"])
def test_sequences_without_a_label_count_for_nothing(method: type[credo.Posterior], partly: bool) -> None:
    x = torch.randn(12, 7, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(84).view(12, 7) % 3
    if partly:
        y[2, 3:] = y[4, :6] = -100
    y[1::2] = -100
    got, wanted = after_one_step(method, x, y), after_one_step(method, x[::2], y[::2])
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, msg=name)


def test_columns_of_padding_change_no_curvature() -> None:
    x = torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(42).view(6, 7) % 3
    y[:, 4:] = -100
    got, wanted = after_one_step(credo.VOGN, x, y), after_one_step(credo.VOGN, x[:, :4], y[:, :4])
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, msg=name)
