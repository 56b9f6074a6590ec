"""SWAG's moments and draws against numpy on the weights that were visited."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.methods.swag.moments import RunningMoments

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (12,), generator=torch.Generator().manual_seed(1))


def vectors(count: int, size: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size)) * [1.0, 2.0, 0.5, 3.0, 1.0][:size] + 4


def moments_of(rows: np.ndarray, *, rank: int, random: int | None = None, **options: Any) -> RunningMoments:
    options = {"dtype": torch.float64, **options}
    made = RunningMoments(rows.shape[1], random=random or rows.shape[1], rank=rank, **options)
    for row in rows:
        made.add_(torch.as_tensor(row, dtype=options["dtype"]))
    return made


def deviations(rows: np.ndarray) -> np.ndarray:
    """√((i−1)/i)·(θᵢ − θ̄ᵢ₋₁), the slow way."""
    return np.stack([math.sqrt((i - 1) / i) * (rows[i - 1] - rows[: i - 1].mean(0)) for i in range(2, len(rows) + 1)])


def dense(rows: np.ndarray, rank: int) -> np.ndarray:
    """The covariance of a draw, from all visited weights."""
    diagonal = np.diag(rows.var(0, ddof=1))
    last = deviations(rows)[-rank:] if rank else np.zeros((0, rows.shape[1]))
    return diagonal if not rank else (diagonal + last.T @ last / len(last)) / 2


class TestMoments:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 11])
    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_they_are_those_of_numpy(self, count: int, rank: int) -> None:
        rows = vectors(count)
        made = moments_of(rows, rank=rank)
        assert made.count == count
        np.testing.assert_allclose(made.mean, rows.mean(0), rtol=1e-12)
        wanted = np.diag(dense(rows, rank)) if count > 1 else np.zeros(5)
        np.testing.assert_allclose(made.variances(), wanted, rtol=1e-10, atol=1e-14)

    def test_the_ring_holds_the_last_deviations(self) -> None:
        rows = vectors(9)
        ring = moments_of(rows, rank=3).deviations.numpy()
        wanted = deviations(rows)[-3:]
        np.testing.assert_allclose(np.sort(ring, axis=0), np.sort(wanted, axis=0), rtol=1e-12)

    @pytest.mark.parametrize("count", [2, 3, 6, 7])
    def test_up_to_one_more_than_the_rank_the_low_rank_part_is_the_whole_sample_covariance(self, count: int) -> None:
        rows = vectors(count)
        kept = moments_of(rows, rank=6).deviations[: count - 1].numpy()
        np.testing.assert_allclose(kept.T @ kept / (count - 1), np.cov(rows.T), rtol=1e-10, atol=1e-12)

    def test_weights_far_from_zero_keep_their_variance_in_single_precision(self) -> None:
        """The mean of squares minus the square of the mean, as published, has nothing left here."""
        rows = (vectors(30) - 4) * 1e-3 + 50
        rows = rows.astype(np.float32)
        made = moments_of(rows, rank=0, dtype=torch.float32)
        np.testing.assert_allclose(made.variances(), rows.astype(np.float64).var(0, ddof=1), rtol=0.05)
        naive = (rows**2).mean(0) - rows.mean(0) ** 2
        assert not np.allclose(naive, rows.astype(np.float64).var(0, ddof=1), rtol=0.5)

    def test_only_the_first_entries_have_a_covariance(self) -> None:
        rows = vectors(6)
        made = moments_of(rows, rank=2, random=3)
        np.testing.assert_allclose(made.mean, rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(made.variances(), np.diag(dense(rows[:, :3], 2)), rtol=1e-10)

    def test_forgotten_vectors_leave_no_trace(self) -> None:
        made = moments_of(vectors(7, seed=1), rank=3)
        made.forget_()
        for row in vectors(3):
            made.add_(torch.as_tensor(row))
        assert torch.equal(made.variances(), moments_of(vectors(3), rank=3).variances())

    @pytest.mark.parametrize(("count", "rank"), [(3, 4), (4, 2), (12, 3), (5, 0)])
    def test_noise_has_the_covariance_of_the_formula(self, count: int, rank: int) -> None:
        """Noise is linear in its normal numbers z: A Aᵀ, with the columns of A from unit vectors z."""
        rows = vectors(count)
        made = moments_of(rows, rank=rank)
        size = 5 + min(rank, count - 1)
        columns = [noise_at(made, torch.eye(size, dtype=torch.float64)[i]) for i in range(size)]
        root = torch.stack(columns, dim=1).numpy()
        np.testing.assert_allclose(root @ root.T, dense(rows, rank), rtol=1e-10, atol=1e-12)


def noise_at(made: RunningMoments, normal: Tensor) -> Tensor:
    """The noise for given standard normal numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda size, **_: normal.clone())
        return made.noise(torch.Generator())


def trained(steps: int, **options: Any) -> tuple[credo.SWAG, np.ndarray]:
    """A posterior after so many steps of SGD, and the weights after each of them."""
    torch.manual_seed(0)
    posterior = credo.SWAG(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double(),
        data_size=12,
        lr=0.3,
        optimizer="sgd",
        **options,
    )
    seen = []
    for step in range(steps):
        rows = torch.arange(12) % 3 == step % 3
        posterior.step(lambda net, rows=rows: F.cross_entropy(net(X[rows].double()), Y[rows]))
        seen.append(torch.cat([p.detach().flatten() for p in posterior.model.parameters()]).numpy())
    return posterior, np.stack(seen)


def flat(tensors: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).numpy()


@pytest.mark.parametrize(
    ("options", "collected"),
    [
        ({}, slice(0, None)),
        ({"every": 3}, slice(2, None, 3)),
        ({"start": 4}, slice(4, None)),
        ({"start": 4, "every": 2}, slice(5, None, 2)),
    ],
)
def test_the_moments_are_those_of_the_visited_weights(options: dict[str, Any], collected: slice) -> None:
    posterior, seen = trained(11, rank=3, **options)
    rows = seen[collected]
    assert posterior.collected == len(rows)
    np.testing.assert_allclose(flat(posterior.mean()), rows.mean(0), rtol=1e-10)
    np.testing.assert_allclose(flat(posterior.std()), np.sqrt(np.diag(dense(rows, 3))), rtol=1e-8)


@pytest.mark.parametrize(("rank", "scale"), [(3, 1.0), (20, 1.0), (20, 0.4), (0, 2.0)])
def test_a_draw_is_the_formula(rank: int, scale: float) -> None:
    posterior, seen = trained(9, rank=rank, scale=scale)
    last = deviations(seen)[-rank:] if rank else np.zeros((0, seen.shape[1]))
    normal = torch.randn(seen.shape[1] + len(last), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, second = normal[: seen.shape[1]].numpy(), normal[seen.shape[1] :].numpy()
    wanted = seen.std(0, ddof=1) * first
    if rank:
        # Rows of the ring are in the order in which they were written, the newest in the place of the oldest.
        ring = last if len(last) < rank else np.roll(last, (len(seen) - 1) % rank, axis=0)
        wanted = (wanted + ring.T @ second / math.sqrt(len(last))) / math.sqrt(2)
    posterior.reseed_(3)
    np.testing.assert_allclose(flat(posterior.draw()), seen.mean(0) + math.sqrt(scale) * wanted, rtol=1e-10)


def test_scale_zero_is_the_average_network() -> None:
    posterior, seen = trained(6, scale=0.0)
    assert not posterior.is_random
    np.testing.assert_allclose(flat(posterior.draw()), seen.mean(0), rtol=1e-10)
    assert all(not bool(std.any()) for std in posterior.std().values())


def test_the_mean_of_noisy_steps_is_near_the_optimum_of_ridge_regression() -> None:
    """With a constant rate, SGD on a quadratic loss circles the optimum; the average of its path converges."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + torch.randn(60, 1, generator=generator).double()
    model = nn.Linear(2, 1, bias=False).double()
    likelihood = credo.GaussianNoise(std=1.0)
    posterior = credo.SWAG(
        model, data_size=60, prior=0.5, lr=0.1, optimizer="sgd", start=20, likelihood=likelihood, rank=2
    )
    for step in range(260):
        rows = torch.arange(60) % 6 == step % 6
        posterior.step(lambda net, rows=rows: likelihood.nll(net(x[rows]), y[rows]).mean())
    exact = torch.linalg.solve(x.T @ x + 4 * torch.eye(2, dtype=torch.float64), x.T @ y).T
    off = [float((weight - exact).norm()) for weight in (posterior.mean()["weight"], model.weight.detach())]
    assert off[0] < 0.02
    assert off[0] < 0.2 * off[1]
