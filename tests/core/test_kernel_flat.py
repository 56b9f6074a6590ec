"""Compiled passes over flat vectors against torch, and their noise against known answers."""

import ctypes

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from credo.core.kernels import flat
from credo.core.kernels import row_scaling as activations
from credo.core.kernels.build import library

pytestmark = pytest.mark.skipif(library("flat") is None, reason="no compiled kernels here")
CPU = torch.device("cpu")


def noise(size: int, key: int, threads: int = 1) -> Tensor:
    out = torch.empty(size)
    kernels = library("flat")
    assert kernels is not None
    kernels.credo_normal(ctypes.c_uint64(key), ctypes.c_int64(size), ctypes.c_void_p(out.data_ptr()), threads)
    return out


@pytest.mark.parametrize(
    ("key", "first"),
    [
        # Philox4x32-7 of Random123's known answers for key and counter zero.
        (0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ],
)
def test_words_are_the_published_ones(key: int, first: tuple[int, ...]) -> None:
    words = (ctypes.c_uint32 * 1024)()
    kernels = library("flat")
    assert kernels is not None
    kernels.credo_philox(ctypes.c_uint64(key), ctypes.c_uint64(0), words)
    assert tuple(words[i * 256] for i in range(4)) == first


def plain_philox(key: int, counter: int) -> list[int]:
    words, (k0, k1) = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], (key & 0xFFFFFFFF, key >> 32)
    for _ in range(7):
        p0, p1 = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(p1 >> 32) ^ words[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ words[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return words


@pytest.mark.parametrize("block", [0, 1, 7, 2**24 - 1, 2**24, 2**30])
def test_words_equal_the_slow_way(block: int) -> None:
    key = 0x0123456789ABCDEF
    words = (ctypes.c_uint32 * 1024)()
    kernels = library("flat")
    assert kernels is not None
    kernels.credo_philox(ctypes.c_uint64(key), ctypes.c_uint64(block), words)
    for j in (0, 1, 8, 100, 255):
        assert [words[w * 256 + j] for w in range(4)] == plain_philox(key, block * 256 + j)


def test_noise_is_standard_normal() -> None:
    # Fixed keys; on fresh ones each comparison would fail once in 10,000 runs.
    x = noise(2_000_000, 12345).double()
    n = len(x)
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-4
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        z = (x.pow(power).mean() - moment) * (n / spread) ** 0.5
        assert abs(float(z)) < 3.9, f"moment {power}"
    # Neighbours, also those that share a Philox counter (256 apart), are uncorrelated.
    for lag in (1, 2, 256, 512, 768, 1024):
        assert abs(float((x[:-lag] * x[lag:]).mean()) * n**0.5) < 3.9, f"lag {lag}"
    # The tail beyond four standard deviations: 127 expected.
    assert 85 < int((x.abs() > 4).sum()) < 175


def test_other_keys_give_other_noise() -> None:
    a, b = noise(200_000, 1).double(), noise(200_000, 2).double()
    assert abs(float((a * b).mean()) * len(a) ** 0.5) < 3.9


def test_noise_does_not_depend_on_threads_or_length() -> None:
    whole = noise(100_000, 9)
    assert torch.equal(noise(100_000, 9, threads=2), whole)
    assert torch.equal(noise(5_001, 9), whole[:5_001])


def test_normal_moves_the_generator_and_repeats() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (flat.normal(100, generator, device=CPU, dtype=torch.float32) for _ in range(2))
    assert not torch.equal(a, b)
    again = flat.normal(100, torch.Generator().manual_seed(3), device=CPU, dtype=torch.float32)
    assert torch.equal(a, again)


def test_double_precision_takes_torch() -> None:
    x = flat.normal(10, torch.Generator().manual_seed(0), device=CPU, dtype=torch.float64)
    assert torch.equal(x, torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def test_softplus_to_the_last_digits() -> None:
    rho = torch.cat([torch.linspace(-80, 40, 100_001), torch.tensor([-85.0, 0.0, 80.0])])
    out = torch.empty_like(rho)
    kernels = library("flat")
    assert kernels is not None
    kernels.credo_softplus(flat.address(rho), ctypes.c_int64(len(rho)), flat.address(out), 1)
    exact = torch.logaddexp(rho.double(), torch.zeros_like(rho, dtype=torch.float64))
    exact = torch.where(rho < -20, torch.log1p(rho.double().exp()), exact)
    assert float(((out - exact) / exact).abs().max()) < 5e-7


SHAPES = [(3, 5), (7,), (40, 33), (1,), (1021,), (2, 3, 4), (1500,)]


def case(seed: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    means = [torch.randn(s, generator=g) for s in SHAPES]
    gradients = [torch.randn(s, generator=g) for s in SHAPES]
    rho = torch.randn(sum(m.numel() for m in means), generator=g) * 3 - 2
    return means, rho, gradients


def listed(tensors: list[Tensor]) -> flat.TensorList:
    return flat.TensorList(tensors, [t.numel() for t in tensors])


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def test_draw_against_torch() -> None:
    means, rho, _ = case(0)
    expected = joined(means).double() + F.softplus(rho.double()) * noise(len(rho), 77).double()
    torch.testing.assert_close(flat.softplus_draw(listed(means), rho, 77).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("add", [False, True])
def test_way_back_against_autograd(add: bool) -> None:
    means, rho, gradients = case(1)
    mean, deep = joined(means).double().requires_grad_(), rho.double().requires_grad_()
    std, eps, g = F.softplus(deep), noise(len(rho), 5).double(), joined(gradients).double()
    kl = (torch.log(0.7 / std) + (std**2 + (mean - 0.2) ** 2) / (2 * 0.7**2) - 0.5).sum()
    ((mean + std * eps) @ g + 0.03 * kl).backward()
    assert mean.grad is not None
    assert deep.grad is not None
    before, before_rho = [torch.full_like(t, 0.25) for t in means], torch.full_like(rho, -0.5)
    into = before if add else gradients
    value, squares = flat.softplus_back(
        listed(means), rho, 5, listed(gradients), listed(into), before_rho,
        add=add, kl_weight=0.03, prior_mean=0.2, prior_precision=1 / 0.7**2,
    )  # fmt: skip
    constant = -0.5 * len(rho) * (1 + torch.tensor(1 / 0.7**2).log())
    torch.testing.assert_close(value + float(constant), float(kl.detach()), rtol=1e-5, atol=0)
    expected_mean = mean.grad + (0.25 if add else 0)
    expected_rho = deep.grad + (-0.5 if add else 0)
    torch.testing.assert_close(joined(into).double(), expected_mean, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(before_rho.double(), expected_rho, rtol=2e-5, atol=2e-5)
    total = float(expected_mean.square().sum() + expected_rho.square().sum())
    torch.testing.assert_close(squares, total, rtol=1e-5, atol=0)


def test_a_missing_gradient_counts_as_zero() -> None:
    means, rho, gradients = case(2)
    some: list[Tensor | None] = [*gradients]
    some[2] = None
    sizes = [t.numel() for t in means]
    outcomes = []
    for given in (some, [*gradients[:2], torch.zeros_like(gradients[2]), *gradients[3:]]):
        by_mean, by_rho = [torch.empty_like(m) for m in means], torch.empty_like(rho)
        flat.softplus_back(
            listed(means), rho, 5, flat.TensorList(given, sizes), listed(by_mean), by_rho,
            add=False, kl_weight=0.1, prior_mean=0.0, prior_precision=1.0,
        )  # fmt: skip
        outcomes.append((joined(by_mean), by_rho))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_nan_is_seen_in_the_squares() -> None:
    means, rho, gradients = case(3)
    gradients[4][17] = float("nan")
    _, squares = flat.softplus_back(
        listed(means), rho, 5, listed(gradients), listed(gradients), torch.empty_like(rho),
        add=False, kl_weight=0.1, prior_mean=0.0, prior_precision=1.0,
    )  # fmt: skip
    assert squares != squares


def test_draw_from_a_precision_against_torch() -> None:
    means, curvature, _ = case(4)
    curvature = curvature.exp()
    drawn = flat.precision_draw(listed(means), curvature, 31, scale=0.02, shift=0.3)
    expected = joined(means).double() + noise(len(curvature), 31).double() * (0.02 / (curvature.double() + 0.3)).sqrt()
    torch.testing.assert_close(drawn.double(), expected, rtol=1e-6, atol=1e-6)


def test_prices_estimate_against_torch() -> None:
    _, curvature, gradients = case(5)
    curvature = curvature.exp()
    found = torch.ones_like(curvature)
    flat.price_(found, listed(gradients), curvature, 8, scale=0.02, shift=0.3, add=True)
    std = (0.02 / (curvature.double() + 0.3)).sqrt()
    expected = 1 + joined(gradients).double() * noise(len(curvature), 8).double() / std
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    flat.price_(found, listed(gradients), curvature, 8, scale=0.02, shift=0.3, add=False)
    torch.testing.assert_close(found.double(), expected - 1, rtol=1e-5, atol=1e-5)


def test_gaussian_against_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, std = torch.randn(70, 50, generator=torch.Generator().manual_seed(0)), torch.rand(70, 50) + 0.1
    drawn = flat.gaussian(mean, std, torch.Generator().manual_seed(6))
    key = flat.new_key(torch.Generator().manual_seed(6))
    torch.testing.assert_close(drawn, mean + std * noise(3500, key).view(70, 50), rtol=1e-6, atol=1e-6)
    turned = flat.gaussian(mean.t(), std.t(), torch.Generator().manual_seed(6))  # not contiguous
    torch.testing.assert_close(turned, mean.t() + std.t() * noise(3500, key).view(50, 70), rtol=1e-6, atol=1e-6)
    monkeypatch.setenv("CREDO_KERNELS", "0")
    plain = flat.gaussian(mean, std, torch.Generator().manual_seed(6))
    eps = torch.randn(70, 50, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(plain, mean + std * eps, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropped_keeps_the_right_share_and_scales_it(rate: float) -> None:
    x = torch.rand(400_000, generator=torch.Generator().manual_seed(0)) + 1
    out = activations.dropped(x, rate, 77)
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / (1 - rate))
    # Fixed key; on fresh ones each comparison would fail once in 10,000 runs.
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(float(kept.double().mean()) - (1 - rate)) < 3.9 * spread / len(x) ** 0.5
    centred = (kept.double() - (1 - rate)) / spread
    for lag in (1, 256, 512, 768, 1024):
        assert abs(float((centred[:-lag] * centred[lag:]).mean()) * len(x) ** 0.5) < 3.9, f"lag {lag}"


def test_dropped_has_the_same_mask_on_the_way_back_whatever_the_order_in_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    for order in (torch.contiguous_format, torch.channels_last):
        x = (torch.rand(3, 5, 7, 9, generator=generator) + 1).to(memory_format=order).requires_grad_()
        out = activations.dropped(x, 0.4, 5)
        weight = torch.randn(x.shape, generator=generator)  # contiguous: the gradient's order is not the input's
        (gradient,) = torch.autograd.grad((out * weight).sum(), x)
        torch.testing.assert_close(gradient, weight * (out != 0) / 0.6)
    odd = torch.rand(6, 10, generator=generator).t()[:, 1:]
    assert activations.dropped(odd, 0.4, 5).shape == odd.shape


def test_dropped_can_be_differentiated_twice() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (first,) = torch.autograd.grad(activations.dropped(x, 0.5, 9).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    kept = activations.dropped(torch.ones(50), 0.5, 9)
    torch.testing.assert_close(second, 6 * x.detach() * kept**3)


def test_dropped_depends_on_the_key_alone() -> None:
    x = torch.ones(300_000)
    one = activations.dropped(x, 0.3, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(one, activations.dropped(x, 0.3, 1))
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(one, activations.dropped(x, 0.3, 2))


MAPS = [(3, 4, 5), (2, 3, 7, 9), (2, 2, 3, 4, 5), (4, 3, 16, 16), (0, 3, 4, 4)]


@pytest.mark.parametrize(
    ("shape", "kernels"), [(shape, kernels) for shape in MAPS for kernels in "10"] + [((5, 3), "0")]
)
def test_scaled_rows_equal_broadcasting_also_on_the_way_back(
    shape: tuple[int, ...], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDO_KERNELS", kernels)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    scale = torch.randn(shape[1], shape[0], generator=generator).t()  # not contiguous
    weight = torch.randn(shape, generator=generator)
    found = []
    for run in (activations.scaled_rows, lambda a, b: a * b.reshape(*b.shape, *[1] * (a.dim() - 2))):
        leaves = x.clone().requires_grad_(), scale.clone().requires_grad_()
        out = run(*leaves)
        first = torch.autograd.grad((out.sin() * weight).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        plain = torch.autograd.grad((run(*leaves) * weight).sum(), leaves)  # the compiled way back
        only = torch.autograd.grad((run(x, leaves[1]) * weight).sum(), leaves[1])
        found.append([out.detach(), *(g.detach() for g in first), *second, *plain, *only])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_scaling_and_dropping_leave_other_tensors_to_torch() -> None:
    x, scale = torch.ones(2, 3, 4, 4), torch.ones(2, 3)
    assert activations.can_scale(x, scale)
    assert activations.can_drop(x)
    assert not activations.can_scale(x, scale.double())
    assert not activations.can_scale(x.to(memory_format=torch.channels_last), scale)
    assert not activations.can_drop(x.to(torch.bfloat16))
    assert torch.func.vmap(lambda one: torch.tensor(activations.can_drop(one)))(x).any().item() is False
