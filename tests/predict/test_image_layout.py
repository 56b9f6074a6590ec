"""Images are laid out, and cut into pieces, as a conv net runs fastest on them, and only where it answers the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo


class Images(nn.Module):
    """A small conv net; `view` refuses channels that lie together, `centred` looks at the whole batch."""

    def __init__(self, *, view: bool = False, centred: bool = False) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 6, 3), nn.Linear(6 * 9, 4)
        self.view, self.centred = view, centred
        self.seen: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((len(x), x.is_contiguous()))
        x = F.max_pool2d(self.conv(x).relu(), 2)
        x = self.out(x.view(len(x), -1) if self.view else x.flatten(1))
        return x - x.mean(0) if self.centred else x


@pytest.mark.parametrize("view", [False, True])
def test_images_are_laid_out_as_the_network_likes_it(view: bool) -> None:
    torch.manual_seed(0)
    network, x = Images(view=view), torch.randn(5, 3, 8, 8)
    posterior = credo.BBB(network, data_size=10, std_init=0.2)
    quick = credo.predict(posterior, x, draws=12)
    assert network.seen[-12:] == [(5, view)] * 12
    plain = credo.predict(posterior, x, draws=12, strategy="loop")
    assert network.seen[-12:] == [(5, True)] * 12
    torch.testing.assert_close(quick.probs, plain.probs, rtol=1e-4, atol=1e-5)


def test_a_draw_sees_a_large_batch_in_pieces() -> None:
    torch.manual_seed(0)
    network, x = Images(), torch.randn(300, 3, 8, 8)
    posterior = credo.BBB(network, data_size=10, std_init=0.2)
    quick = credo.predict(posterior, x, draws=4, shared_draws=True)
    assert network.seen[-12:] == [(128, False), (128, False), (44, False)] * 4
    plain = credo.predict(posterior, x, draws=4, shared_draws=True, strategy="loop")
    assert network.seen[-4:] == [(300, True)] * 4
    torch.testing.assert_close(quick.probs, plain.probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("members", [1, 2])
def test_dropout_sees_pieces_as_well(members: int) -> None:
    """Its passes never agree, and that said nothing of the layout: a network of images took three times as long."""
    torch.manual_seed(0)
    networks, x = [Images() for _ in range(members)], torch.randn(300, 3, 8, 8)
    parts = [credo.MCDropout(network, data_size=10, rate=0.3) for network in networks]
    posterior = parts[0] if members == 1 else credo.Ensemble(parts)
    quick = credo.predict(posterior, x, draws=400)
    seen = [entry for network in networks for entry in network.seen if entry[0] > 2]
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


def test_a_network_that_squeezes_a_single_row_gets_batches_whole() -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(Squeezed(), data_size=10, std_init=0.2, likelihood="bernoulli")
    x = torch.randn(129, 3, 8, 8)
    quick, plain = (credo.predict(posterior, x, draws=3, strategy=name) for name in ("auto", "loop"))
    torch.testing.assert_close(quick.probs, plain.probs)


def test_a_network_that_looks_at_the_whole_batch_gets_it_whole() -> None:
    torch.manual_seed(0)
    network, x = Images(centred=True), torch.randn(300, 3, 8, 8)
    posterior = credo.BBB(network, data_size=10, std_init=0.2)
    quick = credo.predict(posterior, x, draws=4)
    assert network.seen[-4:] == [(300, True)] * 4
    plain = credo.predict(posterior, x, draws=4, strategy="loop")
    torch.testing.assert_close(quick.probs, plain.probs)
