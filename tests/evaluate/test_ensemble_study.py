"""Ensembles of draws against a slow loop over groups of networks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.evaluate import ensemble_study, sample_study


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def mixture() -> credo.Posterior:
    return credo.Ensemble([credo.BBB(small(seed), data_size=10, init=0.6) for seed in range(3)])


POSTERIORS: dict[str, Callable[[], credo.Posterior]] = {
    "bbb": lambda: credo.BBB(small(), data_size=10, init=0.6),
    "mixture": mixture,
}


def examples(count: int = 53) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, generator=generator), torch.randint(4, (count,), generator=generator)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_it_is_a_slow_loop_over_groups(kind: str) -> None:
    posterior = POSTERIORS[kind]()
    x, y = examples()
    probs = []
    with torch.no_grad(), posterior.seeded(7):
        for draw in posterior.iter_draws(24):
            with posterior.sampled(draw) as net:
                probs.append(net(x).softmax(-1))
    study = ensemble_study(posterior, DataLoader(TensorDataset(x, y), batch_size=15), (1, 5, 6, 24), draws=24, seed=7)
    assert list(study.accuracies) == [1, 5, 6, 24]
    for size, found in study.accuracies.items():
        groups = [torch.stack(probs[i : i + size]).mean(0) for i in range(0, 24 - size + 1, size)]
        expected = [(group.argmax(-1) == y).double().mean().item() for group in groups]
        assert found.tolist() == pytest.approx(expected, abs=1e-12), size
        assert study.means[size] == pytest.approx(sum(expected) / len(expected))
    assert len(study.accuracies[5]) == 4, "the last four networks fill no ensemble of five"
    assert len(set(study.accuracies[1].tolist())) > 3


def test_its_ends_are_those_of_sample_study() -> None:
    posterior, batch = POSTERIORS["bbb"](), examples()
    singles = sample_study(posterior, [batch], draws=30, seed=3)
    study = ensemble_study(posterior, [batch], (1, 30), draws=30, seed=3)
    assert torch.equal(study.accuracies[1], singles.accuracies)
    assert study.means[30] == singles.ensembled


def test_ensembles_help_a_noisy_posterior() -> None:
    """σ = 1 around a network that is always right: one draw often is not, all together nearly always are."""
    net = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.copy_(2 * torch.eye(4))
    x, y = torch.eye(4).repeat(25, 1), torch.arange(4).repeat(25)
    means = ensemble_study(credo.BBB(net, data_size=10, init=1.0), [(x, y)]).means
    assert list(means) == [1, 5, 10, 25, 100]
    # One draw is right if 2 + ε₀ exceeds three other εᵢ: 0.823 by numerical integration; 400 tries have an
    # std of 0.019, four of which are exceeded once in 16,000 times.
    assert abs(means[1] - 0.823) < 4 * 0.019
    assert means[1] < means[5] <= means[25]
    assert means[100] == 1.0


def test_a_point_estimate_is_always_the_same_network() -> None:
    posterior, (x, y) = credo.MAP(small(), data_size=10), examples()
    with torch.no_grad():
        right = (posterior.model(x).argmax(-1) == y).double().mean().item()
    study = ensemble_study(posterior, [(x, y)], (1, 5), draws=20)
    assert {size: found.tolist() for size, found in study.accuracies.items()} == {
        1: pytest.approx([right] * 20),
        5: pytest.approx([right] * 4),
    }


def test_it_changes_nothing() -> None:
    posterior, batch = POSTERIORS["bbb"]().train(), examples()
    generator, rng = posterior.generator.get_state(), torch.get_rng_state()
    first = ensemble_study(posterior, [batch], (1, 4), draws=8)
    assert torch.equal(posterior.generator.get_state(), generator)
    assert torch.equal(torch.get_rng_state(), rng)
    assert posterior.training
    assert torch.equal(first.accuracies[4], ensemble_study(posterior, [batch], (1, 4), draws=8).accuracies[4])


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((), {}, r"sizes=\[\] with draws=100"),
        ((1, 101), {}, r"sizes=\[1, 101\] with draws=100"),
        ((0,), {}, "size=0 must be a whole number of networks"),
        ((1,), {"draws": 0}, "draws=0"),
    ],
)
def test_studies_that_cannot_be(sizes: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble_study(POSTERIORS["bbb"](), [examples()], sizes, **options)


def test_fixed_networks_have_nothing_to_draw() -> None:
    fixed = credo.Ensemble([credo.MAP(small(seed), data_size=10) for seed in range(3)])
    with pytest.raises(ValueError, match="Ensemble is 3 fixed networks, with nothing to draw"):
        ensemble_study(fixed, [examples()])
