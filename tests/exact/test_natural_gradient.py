"""Natural-gradient methods reach the Gaussian that their own curvature implies, also under a temperature."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from credo.core.likelihood import GaussianNoise
from credo.core.prior import Gaussian
from credo.methods import IVON, OGN, VOGN, NoisyKFAC

NOISE_STD, PRIOR_STD, PRIOR_MEAN = 0.5, 0.8, 0.3
N = 60


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.5 * x[:, 0] + x[:, 1]
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.4
    return x, (y + NOISE_STD * torch.randn(N, generator=generator, dtype=torch.float64)).unsqueeze(1)


def features() -> Tensor:
    return torch.cat([data()[0], torch.ones(N, 1, dtype=torch.float64)], dim=1)


def exact_mean(temperature: float) -> Tensor:
    """Mean of the tempered posterior: the likelihood to the power 1/T."""
    x, y = features(), data()[1]
    precision = x.T @ x / (NOISE_STD**2 * temperature) + torch.eye(4, dtype=torch.float64) / PRIOR_STD**2
    return torch.linalg.solve(precision, x.T @ y[:, 0] / (NOISE_STD**2 * temperature) + PRIOR_MEAN / PRIOR_STD**2)


def fisher_std(temperature: float) -> Tensor:
    """The std at which σ⁻² = N·ĥ/T + δ, ĥ the mean squared per-example gradient under N(exact mean, σ²) itself."""
    x, y = features(), data()[1][:, 0]
    delta = 1 / PRIOR_STD**2
    std = torch.full((4,), 0.1, dtype=torch.float64)
    residual = (y - x @ exact_mean(temperature)).square()
    for _ in range(200):
        squares = ((residual + x.square() @ std.square()).unsqueeze(1) * x.square()).mean(0) / NOISE_STD**4
        std = (N * squares / temperature + delta).rsqrt()
    return std


def hessian_std(temperature: float) -> Tensor:
    return (features().square().sum(0) / (NOISE_STD**2 * temperature) + 1 / PRIOR_STD**2).rsqrt()


def run(posterior: Any, steps: int, *, batch: int | None = None, decay: bool = True) -> tuple[Tensor, Tensor]:
    """Train with a falling rate; returns mean and std averaged over the last third, which removes their jitter."""
    x, y = data()
    generator = torch.Generator().manual_seed(0)
    means, stds = [], []
    for step in range(steps):
        posterior.lr_scale = 0.5 * (1 + math.cos(math.pi * step / steps)) if decay else 1.0
        rows = torch.arange(N) if batch is None else torch.randperm(N, generator=generator)[:batch]
        posterior.step(lambda net, rows=rows: posterior.likelihood.nll(net(x[rows]), y[rows]))
        if step >= 2 * steps // 3 and hasattr(posterior, "std"):
            means.append(torch.cat([posterior.mean()[n].reshape(-1) for n in ("weight", "bias")]))
            stds.append(torch.cat([posterior.std()[n].reshape(-1) for n in ("weight", "bias")]))
    return torch.stack(means).mean(0), torch.stack(stds).mean(0)


def options(temperature: float, **more: Any) -> dict[str, Any]:
    return {
        "data_size": N,
        "prior": Gaussian(PRIOR_MEAN, PRIOR_STD),
        "temperature": temperature,
        "likelihood": GaussianNoise(NOISE_STD),
        **more,
    }


def network(double: bool) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1).double() if double else nn.Linear(3, 1)


# Each value once, and all pairs of them in the grid.
BATCHES_AND_TEMPERATURES = pytest.mark.parametrize(
    ("batch", "temperature"),
    [(None, 0.5), (30, 1.0), *(pytest.param(*pair, marks=pytest.mark.grid) for pair in ((None, 1.0), (30, 0.5)))],
)


def close(found: tuple[Tensor, Tensor], mean: Tensor, std: Tensor) -> None:
    assert ((found[0] - mean).abs() < 0.3 * std).all()
    assert ((found[1] / std - 1).abs() < 0.1).all()


@BATCHES_AND_TEMPERATURES
def test_vogn(temperature: float, batch: int | None) -> None:
    settings = options(temperature, lr=0.1, damping=0.0, curvature=0.98)
    found = run(VOGN(network(True), **settings), 600, batch=batch)
    close(found, exact_mean(temperature), fisher_std(temperature))


@pytest.mark.parametrize("temperature", [0.5, pytest.param(1.0, marks=pytest.mark.grid)])
def test_vogn_compiled(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mean, std = exact_mean(temperature), fisher_std(temperature)
    x, y = data()
    monkeypatch.setitem(globals(), "data", lambda: (x.float(), y.float()))
    settings = options(temperature, lr=0.5, damping=0.0, draws=2, curvature=0.98, momentum={"averaged": True})
    close(run(VOGN(network(False), **settings), 600), mean.float(), std.float())


def test_the_temperature_does_not_scale_the_prior_in_the_noise() -> None:
    """σ⁻² = N·ĥ/T + δ for ℓ(w) = ½·a·(w − b)² and a prior centred at b."""
    a, b, n, delta, temperature = 3.0, 0.7, 50, 500.0, 0.25
    torch.manual_seed(0)
    posterior = VOGN(
        nn.Linear(1, 1, bias=False).double(),
        data_size=n,
        prior=Gaussian(b, delta**-0.5),
        temperature=temperature,
        lr=0.05,
        damping=0.0,
        draws=2,
        curvature=0.95,
    )
    one = torch.ones(1, 1, dtype=torch.float64)
    variances = []
    for step in range(500):
        posterior.step(lambda net: (0.5 * a * (net(one) - b).square()).mean())
        variances += [float(posterior.std()["weight"]) ** 2] if step >= 200 else []
    slope = n / temperature * a**2
    variance = (-delta + math.sqrt(delta**2 + 4 * slope)) / (2 * slope)  # 1/v = slope·v + δ
    assert sum(variances) / len(variances) == pytest.approx(variance, rel=0.1)


@BATCHES_AND_TEMPERATURES
def test_ivon(temperature: float, batch: int | None) -> None:
    settings = options(temperature, lr=0.05, draws=2, curvature={"decay": 0.99, "init": 4.0}, clip=None)
    found = run(IVON(network(True), **settings), 500, batch=batch)
    close(found, exact_mean(temperature), hessian_std(temperature))


def test_ivon_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, std = exact_mean(0.5), hessian_std(0.5)
    x, y = data()
    monkeypatch.setitem(globals(), "data", lambda: (x.float(), y.float()))
    settings = options(0.5, lr=0.05, draws=2, curvature={"decay": 0.99, "init": 4.0}, clip=None)
    close(run(IVON(network(False), **settings), 500), mean.float(), std.float())


def test_the_two_curvatures_differ() -> None:
    """Else the tests above could not tell which of them a method has."""
    assert ((fisher_std(1.0) / hessian_std(1.0) - 1).abs() > 0.1).any()


def test_ogn_finds_the_maximum() -> None:
    posterior = OGN(network(True), **options(1.0, lr=0.05, damping=0.0))
    x, y = data()
    for _ in range(800):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    found = torch.cat([posterior.model.weight.detach().reshape(-1), posterior.model.bias.detach()])
    torch.testing.assert_close(found, exact_mean(1.0), rtol=1e-3, atol=1e-3)


class Quadratic(nn.Module):
    """ℓ(w) = ½·a·(w − b)²: one weight, known curvature."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


QUADRATIC: dict[str, tuple[Any, dict[str, Any]]] = {
    "vogn": (VOGN, {"damping": 0.0, "curvature": 0.98}),
    "ivon": (IVON, {"curvature": {"init": 1.0, "decay": 0.98}, "clip": None}),
    "noisy k-fac": (NoisyKFAC, {"damping": 0.0, "curvature": {"inverse_every": 1, "decay": 0.98}, "clip": None}),
}


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [
        (torch.float32, 0.5),
        (torch.float64, 1.0),
        pytest.param(torch.float32, 1.0, marks=pytest.mark.grid),
        pytest.param(torch.float64, 0.5, marks=pytest.mark.grid),
    ],
)
@pytest.mark.parametrize("method", QUADRATIC)
def test_quadratic_in_one_dimension(method: str, dtype: torch.dtype, temperature: float) -> None:
    a, b, n, delta = 3.0, 0.7, 50, 5.0
    torch.manual_seed(0)
    common: dict[str, Any] = {"data_size": n, "temperature": temperature, "prior_precision": delta, "draws": 2}
    make, own = QUADRATIC[method]
    posterior = make(Quadratic(dtype), lr=0.05, **own, **common)
    one = torch.ones(1, 1, dtype=dtype)
    variances, means = [], []
    for step in range(400):
        posterior.lr_scale = 0.5 * (1 + math.cos(math.pi * step / 400))
        posterior.step(lambda net: (0.5 * a * (net(one) - b).square()).mean())
        if step >= 250:
            variances.append(float(posterior.std()["linear.weight"]) ** 2)
            means.append(float(posterior.mean()["linear.weight"]))
    tempered = n * a / temperature
    mean = tempered * b / (tempered + delta)
    variance = 1 / (tempered + delta)
    for _ in range(500 if method != "ivon" else 0):  # the others' curvature is E[(a(w − b))²] under q itself
        fisher = n / temperature * a**2 * (variance + (mean - b) ** 2)
        # K-FAC's prior is added to both factors, (A + π√δ̃)(G + √δ̃/π) with π² = A/G: it is (√(AG) + √δ̃)².
        variance = 1 / (fisher + delta if method == "vogn" else (fisher**0.5 + delta**0.5) ** 2)
    assert abs(sum(means) / len(means) - mean) < 0.3 * variance**0.5
    assert sum(variances) / len(variances) == pytest.approx(variance, rel=0.2)  # 10 % of the std
