"""A noise that all weights had a part in fitting: that of the Laplace approximation of all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.errors import PredictiveWarning
from credo.methods.laplace import all_weights


def data(rows: int, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    y = (2 * x[:, :1]).sin() + 0.5 * torch.randn(rows, outputs, generator=generator)
    return x, y


def fitted(net: nn.Module, rows: Any, **options: Any) -> credo.Laplace:
    size = sum(len(y) for *_, y in rows) if isinstance(rows, list) else None
    return credo.Laplace(net, data_size=size, likelihood="gaussian", **options).fit(rows, progress=False)


def noise(posterior: credo.Posterior) -> float:
    return float(F.softplus(posterior.likelihood.noise_rho.detach().double()))  # type: ignore[union-attr, arg-type, operator]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(2))[0][:, -1])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
    "wide": lambda: nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 1)),
    "two outputs": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)),
    "lstm": Recurrent,
    "dictionary": Named,
}


def network(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return NETWORKS[kind]()


@pytest.mark.filterwarnings("ignore::credo.core.errors.PredictiveWarning")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("kind", NETWORKS)
def test_it_is_that_of_all_weights_exactly(kind: str, temperature: float) -> None:
    x, y = data(60, 2 if kind == "two outputs" else 1)
    batches = [
        ({"values": a, "labels": b} if kind == "dictionary" else (a, b))
        for a, b in zip(x.split(25), y.split(25), strict=True)
    ]
    options: dict[str, Any] = {"data_size": 60, "likelihood": "gaussian", "temperature": temperature}
    last = credo.Laplace(network(kind), **options).fit(batches, progress=False)
    whole = credo.Laplace(network(kind), random="all", structure="full", **options).fit(batches, progress=False)
    assert noise(last) == pytest.approx(noise(whole), rel=1e-5)
    # The curvature is that at this noise, and the prior the best one under it.
    known = credo.Laplace(network(kind), **{**options, "likelihood": credo.GaussianNoise(noise(last))})
    known.fit(batches, progress=False)
    for name, std in known.std().items():
        torch.testing.assert_close(last.std()[name], std, rtol=1e-4, atol=0)
    assert last.log_marginal_likelihood() == pytest.approx(known.log_marginal_likelihood(), rel=1e-4)


def test_choosing_a_prior_again_leaves_the_noise(tmp_path: Path) -> None:
    x, y = data(60)
    last = fitted(network("tanh"), [(x, y)])
    credo.save(last, tmp_path / "last.safetensors")
    for posterior in (last, credo.load(tmp_path / "last.safetensors", model=network("tanh"))):
        assert isinstance(posterior, credo.Laplace)
        before, precision = noise(posterior), float(posterior.precision)
        posterior.tune_prior_()
        assert noise(posterior) == pytest.approx(before, rel=1e-6)
        assert float(posterior.precision) == pytest.approx(precision, rel=1e-4)


def test_weights_that_were_not_trained_have_fitted_nothing() -> None:
    x, y = data(60)
    frozen = network("tanh")
    frozen[0].requires_grad_(False)  # type: ignore[index]
    found = fitted(frozen, [(x, y)])
    features = nn.Sequential(*list(frozen)[:2])(x).detach()  # type: ignore[call-overload]
    alone = fitted(frozen[2], [(features, y)], random="all")  # type: ignore[index]
    assert noise(found) == pytest.approx(noise(alone), rel=1e-5)


def test_more_rows_than_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(400)
    exact = noise(fitted(network("tanh"), [(x, y)]))
    residual = float((network("tanh")(x) - y).detach().square().mean().sqrt())
    assert exact > 1.01 * residual
    monkeypatch.setattr(all_weights, "MOST_TARGETS", 100)
    assert noise(fitted(network("tanh"), list(zip(x.split(64), y.split(64), strict=True)))) == pytest.approx(
        exact, rel=5e-3
    )
    monkeypatch.setattr(all_weights, "MOST_BYTES", 1)  # a row alone
    assert noise(fitted(network("tanh"), [(x, y)])) == pytest.approx(residual, rel=5e-3)


class Whole(nn.Module):
    """A network whose rows are no batch: each depends on all, and there is no first part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 60:
            raise RuntimeError("this is no whole graph")
        return self.head((self.body(x) - self.body(x).mean(0)).tanh())


def test_rows_that_cannot_be_taken_apart_leave_the_noise_to_the_last_layer() -> None:
    x, y = data(60)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Whole()
    features = (net.body(x) - net.body(x).mean(0)).tanh().detach()
    alone = fitted(net.head, [(features, y)], random="all")
    assert noise(fitted(net, [(x, y)])) == pytest.approx(noise(alone), rel=1e-5)


def overfitted(seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, y = data(1100, seed=seed)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(1500):
        optimizer.zero_grad()
        F.mse_loss(net(x[:100]), y[:100]).backward()
        optimizer.step()
    return net, (x[:100], y[:100]), (x[100:], y[100:])


def test_an_overfitted_network_covers_what_it_says() -> None:
    """With the noise of the last layer's own evidence, 90 % intervals had about half of the new targets."""
    covered, before = [], []
    for seed in range(3):
        net, train, test = overfitted(seed)
        with pytest.warns(PredictiveWarning, match=r"has fitted much of the noise .*credo.calibrate"):
            posterior = fitted(net, [train])
        alone = fitted(nn.Sequential(*net[:2]).requires_grad_(False).append(net[2]), [train])  # type: ignore[index]
        for found, each in ((covered, posterior), (before, alone)):
            prediction = credo.predict(each, [test])
            found.append(float(((prediction.mean - test[1]).abs() <= 1.645 * prediction.total).double().mean()))
    assert sum(before) / 3 < 0.7
    assert sum(covered) / 3 > sum(before) / 3 + 0.15
