"""Shared draws: the same networks for all inputs, however the inputs are cut into batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.predict import draw_loop

FIELDS = (
    "probs",
    "mean_entropy",
    "entropy_deviation",
    "aleatoric_by_class",
    "epistemic_by_class",
    "log_likelihood",
    "mc_error",
)
Network = Callable[..., nn.Module]


def posterior_of(kind: str, mlp: Network, conv: Network) -> tuple[credo.Posterior, Tensor]:
    generator = torch.Generator().manual_seed(3)
    flat, images = torch.randn(23, 3, generator=generator), torch.randn(23, 2, 8, 8, generator=generator)
    if kind == "bbb":
        return credo.BBB(mlp(), data_size=10, init=0.5), flat
    if kind == "bbb conv":
        return credo.BBB(conv(), data_size=10, init=0.2), images
    if kind == "ensemble of bbb":
        return credo.Ensemble([credo.BBB(mlp(seed=s), data_size=10, init=0.5) for s in range(3)]), flat
    return credo.Ensemble([credo.MAP(conv(seed=s), data_size=10) for s in range(3)]), images


KINDS = ["bbb", "bbb conv", "ensemble of bbb", "ensemble of map"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [True, False])
def test_batch_size_does_not_matter(
    kind: str, cached: bool, mlp: Network, conv: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr(draw_loop, "_CACHE_BYTES", 1)
    posterior, x = posterior_of(kind, mlp, conv)
    y = torch.arange(23) % 3
    whole = credo.predict(posterior, [(x, y)], draws=14, shared_draws=True)
    for size in (1, 5, 22):
        batches = list(zip(x.split(size), y.split(size), strict=True))
        pieces = credo.predict(posterior, batches, draws=14, shared_draws=True)
        for field in FIELDS:
            # Both come from differences of numbers near 1 in float32: 2⁻²³ of them, its root for the error.
            loose = 3e-4 if field == "mc_error" else 2e-6
            torch.testing.assert_close(getattr(pieces, field), getattr(whole, field), rtol=1e-5, atol=loose)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_see_the_networks_of_a_manual_loop(
    kind: str, mlp: Network, conv: Network, slow_outputs: Callable[..., Tensor]
) -> None:
    posterior, x = posterior_of(kind, mlp, conv)
    expected = slow_outputs(posterior, x, draws=posterior.whole_draws(14), seed=4).softmax(-1).mean(0)
    actual = credo.predict(posterior, x, draws=14, shared_draws=True, batch_size=5, seed=4)
    torch.testing.assert_close(actual.probs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_draws_too_large_to_keep_are_made_again(
    kind: str, strategy: str, mlp: Network, conv: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, x = posterior_of(kind, mlp, conv)
    options = {"draws": 14, "shared_draws": True, "batch_size": 5, "strategy": strategy}
    kept = credo.predict(posterior, x, **options)
    monkeypatch.setattr(draw_loop, "_CACHE_BYTES", 1)
    again = credo.predict(posterior, x, **options)
    assert torch.equal(again.probs, kept.probs)
    assert torch.equal(again.entropy_deviation, kept.entropy_deviation)


def test_the_cache_is_used_and_bounded(mlp: Network, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts draws: 14 once for all five batches, against 14 for each."""
    posterior = credo.BBB(mlp(), data_size=10, init=0.5)
    made = []
    draw = posterior.draw
    monkeypatch.setattr(posterior, "draw", lambda: made.append(1) or draw())
    options = {"draws": 14, "shared_draws": True, "batch_size": 5, "strategy": "loop"}
    credo.predict(posterior, x, **options)
    assert len(made) == 14
    size = 4 * sum(p.numel() for p in posterior.model.parameters())
    monkeypatch.setattr(draw_loop, "_CACHE_BYTES", 14 * size - 1)
    made.clear()
    credo.predict(posterior, x, **options)
    assert len(made) == 5 * 14


def test_without_sharing_batches_get_networks_of_their_own(mlp: Network, x: Tensor) -> None:
    posterior = credo.BBB(mlp(), data_size=10, init=0.5)
    twice = torch.cat([x[:1], x[:1]])
    apart = credo.predict(posterior, twice, draws=5, batch_size=1, strategy="loop")
    assert not torch.allclose(apart.probs[0], apart.probs[1])
    shared = credo.predict(posterior, twice, draws=5, batch_size=1, strategy="loop", shared_draws=True)
    assert torch.equal(shared.probs[0], shared.probs[1])


def test_shared_dropout_repeats_its_masks_for_every_batch() -> None:
    """There is no network to share; the same seed for each batch is the nearest thing."""
    network = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 4))
    posterior = credo.MCDropout(network, data_size=10)
    x = torch.randn(4, 3)
    shared = credo.predict(posterior, torch.cat([x, x]), draws=5, batch_size=4, shared_draws=True)
    assert torch.equal(shared.probs[:4], shared.probs[4:])
    apart = credo.predict(posterior, torch.cat([x, x]), draws=5, batch_size=4)
    assert not torch.allclose(apart.probs[:4], apart.probs[4:])


def test_seeds(mlp: Network, x: Tensor) -> None:
    posterior = credo.BBB(mlp(), data_size=10, init=0.5)
    for shared in (True, False):
        one, same, other = (
            credo.predict(posterior, x, draws=5, shared_draws=shared, seed=s, batch_size=7).probs for s in (1, 1, 2)
        )
        assert torch.equal(one, same)
        assert not torch.allclose(one, other)
