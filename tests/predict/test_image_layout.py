"""Networks that declare to treat each image by itself see small pieces of a batch, laid out channels last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.network.rowwise import is_rowwise, splits_into_pieces
from credo.models import build_model

Seen = list[tuple[int, bool]]


class Images(nn.Module):
    """A small conv net; `view` raises for channels that lie together, `centred` looks at the whole batch."""

    def __init__(self, *, view: bool = False, centred: bool = False) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 6, 3), nn.Linear(6 * 9, 4)
        self.view, self.centred = view, centred

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x).relu(), 2)
        x = self.out(x.view(len(x), -1) if self.view else x.flatten(1))
        return x - x.mean(0) if self.centred else x


class Declared(Images):
    rowwise = True


def sequential() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 4))


def watched(network: nn.Module) -> Seen:
    """Rows, and whether they are laid out plainly, of every pass."""
    seen: Seen = []
    network.register_forward_pre_hook(lambda _, inputs: seen.append((len(inputs[0]), inputs[0].is_contiguous())))
    return seen


@pytest.mark.parametrize("network", [sequential, Declared])
def test_pieces_and_layout_do_not_change_the_prediction(network: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net, x = network(), torch.randn(300, 3, 8, 8)
    seen = watched(net)
    posterior = credo.BBB(net, data_size=10, init=0.2)
    for shared in (True, False):
        seen.clear()
        quick = credo.predict(posterior, x, draws=4, shared_draws=shared)
        assert seen == [(128, False), (128, False), (44, False)] * 4
        seen.clear()
        plain = credo.predict(posterior, x, draws=4, shared_draws=shared, strategy="loop")
        assert seen == [(300, True)] * 4
        torch.testing.assert_close(quick.probs, plain.probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("members", [1, 2])
def test_dropout_sees_pieces_as_well(members: int) -> None:
    torch.manual_seed(0)
    networks, x = [sequential() for _ in range(members)], torch.randn(300, 3, 8, 8)
    parts = [credo.MCDropout(network, data_size=10, rate=0.3) for network in networks]
    posterior = parts[0] if members == 1 else credo.Ensemble(parts)
    seen = watched(networks[0])
    quick = credo.predict(posterior, x, draws=400)
    assert set(seen) == {(128, False), (44, False)}
    plain = credo.predict(posterior, x, draws=400, strategy="loop")
    torch.testing.assert_close(quick.probs, plain.probs, rtol=0, atol=6 * 0.5 / 400**0.5)
    assert (quick.probs - plain.probs).abs().mean() < 0.5 / 400**0.5
    assert quick.epistemic.mean() == pytest.approx(plain.epistemic.mean().item(), rel=0.05)


class Squeezed(nn.Module):
    """Loses the dimension of a single row, as networks for one number often do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 2, 3), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).relu().mean((2, 3))).squeeze()


@pytest.mark.parametrize(
    "network", [Images, lambda: Images(view=True), lambda: Images(centred=True), lambda: nn.Sequential(Images())]
)
def test_networks_that_declare_nothing_get_batches_whole(network: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net, x = network(), torch.randn(300, 3, 8, 8)
    seen = watched(net)
    posterior = credo.BBB(net, data_size=10, init=0.2)
    quick = credo.predict(posterior, x, draws=4)
    assert seen == [(300, True)] * 4
    assert torch.equal(quick.probs, credo.predict(posterior, x, draws=4, strategy="loop").probs)


def test_a_network_that_squeezes_a_single_row_gets_batches_whole() -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(Squeezed(), data_size=10, init=0.2, likelihood="bernoulli")
    x = torch.randn(129, 3, 8, 8)
    quick, plain = (credo.predict(posterior, x, draws=3, strategy=name) for name in ("auto", "loop"))
    assert torch.equal(quick.probs, plain.probs)


@pytest.mark.parametrize("module", [nn.Flatten(0), nn.Flatten(1, 2), nn.Softmax(0), Images()])
def test_what_may_mix_rows_does_not_count_as_rowwise(module: nn.Module) -> None:
    assert not is_rowwise(nn.Sequential(nn.Conv2d(3, 3, 3), module))
    assert not is_rowwise(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))


@pytest.mark.parametrize("name", ["lenet5", "convnet", "resnet20", "wide-resnet"])
@torch.no_grad()
def test_models_of_the_registry_keep_what_they_declare(name: str) -> None:
    """In eval mode each row is what it is alone, whatever the layout."""
    options = {"depth": 10, "widen": 1} if name == "wide-resnet" else {}
    net = build_model(name, inputs=(3, 32, 32), classes=5, seed=0, **options).eval()
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert splits_into_pieces(net, x)
    assert not splits_into_pieces(net, x[0])
    pieces = [net(row.unsqueeze(0).contiguous(memory_format=torch.channels_last)) for row in x]
    torch.testing.assert_close(torch.cat(pieces), net(x), rtol=1e-4, atol=1e-5)


def test_large_networks_get_batches_whole() -> None:
    net = nn.Sequential(nn.Conv2d(1024, 1025, 1), nn.Flatten())
    assert is_rowwise(net)
    assert not splits_into_pieces(net, torch.zeros(1, 1024, 1, 1))
