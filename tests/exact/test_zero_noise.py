"""As σ → 0 every stochastic pass must equal the deterministic network, whatever the architecture.

The drawn weights are equal bit for bit; outputs up to the last bits, which torch's kernels let depend on how their
operands are aligned in memory.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from credo.methods import BBB

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # oneDNN has none and says so


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.layer = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True, **options)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens)))).mean(1)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))


SEQUENCE, TOKENS, FLAT, IMAGE = (5, 6, 4), None, (5, 4), (5, 2, 6, 6)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "LSTM": (lambda: Recurrent(nn.LSTM), SEQUENCE),
    "LSTM with projection": (lambda: nn.Sequential(_First(nn.LSTM(4, 5, proj_size=3, batch_first=True))), SEQUENCE),
    "GRU": (lambda: Recurrent(nn.GRU), SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "transformer layer": (transformer, SEQUENCE),
    "embedding and tied output": (TiedLanguageModel, TOKENS),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 3)), FLAT),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3)), FLAT),
    "bare linear": (lambda: nn.Linear(4, 3), FLAT),
    "frozen parameters": (frozen, FLAT),
    "in-place ReLU": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), FLAT),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), FLAT),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2, padding_mode="circular"),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4, 2, 2, stride=2),
            nn.Flatten(),
            nn.Linear(288, 3),
        ),
        IMAGE,
    ),
}

if hasattr(nn.utils, "weight_norm"):  # deprecated: may be gone one day
    NETWORKS["old weight norm"] = (old_weight_norm, FLAT)


class _First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].mean(1)


def network_and_input(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = make().to(dtype)
    network.eval()  # spectral norm and batch norm change their buffers in training: compared there apart
    x = torch.randint(7, (5, 6)) if shape is None else torch.randn(shape, dtype=dtype)
    return network, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_pass_equals_the_deterministic_network(name: str, dtype: torch.dtype) -> None:
    network, x = network_and_input(name, dtype)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    expected = network(x)
    posterior = BBB(network, data_size=10, random="*", init={"rho": -200.0})
    draw = posterior.draw()
    weights = {key: p for key, p in network.named_parameters() if p.requires_grad}
    # Equal but for weights that are exactly 0, which become 1e-87.
    assert all(bool(((draw[key] == p) | ((p == 0) & (draw[key].abs() < 1e-80))).all()) for key, p in weights.items())
    torch.testing.assert_close(posterior(x), expected, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(posterior(x), expected, **tolerance)


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_nll_that_a_step_sees_equals_the_deterministic_one(name: str, noise: str) -> None:
    # Double precision: in single precision softplus(−200) is 0 and the KL infinite.
    network, x = network_and_input(name, torch.float64)
    y = torch.tensor([0, 1, 2, 1, 0])
    expected = F.cross_entropy(network(x), y).item()
    posterior = BBB(network, data_size=10, random="*", init={"rho": -200.0}, noise=noise, draws=2, lr=0.0)
    for _ in range(2):  # the second step after layers not covered have been found
        assert posterior.step(lambda net: F.cross_entropy(net(x), y)).nll == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
@pytest.mark.parametrize("name", ["batch norm", "convolutions", "transformer layer", "LSTM"])
def test_in_training_mode_also_the_running_statistics_are_those_of_an_ordinary_pass(name: str, noise: str) -> None:
    network, x = network_and_input(name, torch.float64)
    y = torch.tensor([0, 1, 2, 1, 0])
    ordinary, _ = network_and_input(name, torch.float64)
    posterior = BBB(network, data_size=10, random="*", init={"rho": -200.0}, noise=noise, draws=2, lr=0.0)
    ordinary.train()
    posterior.train()
    expected = F.cross_entropy(ordinary(x), y).item()
    assert posterior.step(lambda net: F.cross_entropy(net(x), y)).nll == pytest.approx(expected, rel=1e-13)
    for (key, value), other in zip(network.state_dict().items(), ordinary.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-13, atol=1e-15, msg=key)


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
@pytest.mark.parametrize("name", NETWORKS)
def test_with_noise_every_pass_is_another(name: str, noise: str) -> None:
    # The counterpart: the tests above would also pass if nothing were random.
    network, x = network_and_input(name, torch.float64)
    y = torch.tensor([0, 1, 2, 1, 0])
    posterior = BBB(network, data_size=10, random="*", init=0.1, noise=noise, lr=0.0)
    assert not torch.equal(posterior(x), posterior(x))
    assert len({posterior.step(lambda net: F.cross_entropy(net(x), y)).nll for _ in range(3)}) == 3
