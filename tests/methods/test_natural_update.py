"""One natural-gradient update: compiled against torch's, and a curvature that nothing can make negative."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.kernels.build import library
from credo.methods.natural.diagonal import Coefficients, DiagonalUpdate

needs_kernels = pytest.mark.skipif(library("flat") is None, reason="no compiled kernels here")
SHAPES = [[(3,)], [(5, 7), (7,)], [(1024,), (1,), (33, 31)], [(40, 50), (2, 3, 4, 5), (), (1500,)]]
UPDATES = {
    "vogn": Coefficients(lr=0.03, keep=0.7, take=1.0, decay=0.95, renew=0.05, shift=0.02, damping=1e-3, prior_mean=0.1,
                   prior_precision=3.0, variance=0.01, gradient_scale=0.5, curvature_scale=0.5),
    "vogn averaged": Coefficients(lr=0.03, keep=0.9, take=0.1, decay=0.0, renew=1.0, shift=0.02, debias=3.0),
    "ivon": Coefficients(lr=0.2, keep=0.9, take=0.1, decay=0.9, renew=0.1, shift=0.05, prior_mean=-0.3, debias=2.0,
                   prior_precision=2.0, variance=0.02, clip=0.4, gradient_scale=1 / 3, curvature_scale=1 / 3,
                   correction=1.0, coupled=0),
    "ivon's point weights": Coefficients(lr=0.2, keep=0.9, take=0.1, decay=1.0, renew=0.0, coupled=0),
    "vogn by adam": Coefficients(lr=0.03, keep=0.9, take=0.1, decay=0.95, renew=0.05, shift=0.02, damping=1e-3,
                   prior_mean=0.1, prior_precision=3.0, variance=0.01, gradient_scale=0.5, curvature_scale=0.5,
                   debias=2.0, square_decay=0.9, square_debias=1.5),
}  # fmt: skip


@dataclass
class State:
    """Parameters with their momentum and curvature."""

    parameters: dict[str, nn.Parameter]
    momentum: Tensor
    curvature: Tensor

    def update(self, numbers: Coefficients, gradients: Any, curvatures: Any) -> DiagonalUpdate:
        self.squares = torch.full_like(self.curvature, 0.2) if numbers.square_decay else None
        vectors = (self.momentum, self.curvature)
        return DiagonalUpdate(self.parameters, *vectors, numbers, gradients, curvatures, squares=self.squares)

    @property
    def tensors(self) -> list[Tensor]:
        return [p.detach() for p in self.parameters.values()]


def state_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[State, Any, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    parameters = {str(i): nn.Parameter(normal(shape)) for i, shape in enumerate(shapes)}
    size = sum(p.numel() for p in parameters.values())
    state = State(parameters, normal((size,)), normal((size,)).square() + 0.1)
    gradients, curvatures = ({n: normal(p.shape) for n, p in parameters.items()} for _ in range(2))
    return state, gradients, curvatures


def with_vectors(numbers: Coefficients, state: State) -> Coefficients:
    """The same numbers as vectors, which the compiled passes do not take."""
    names = ("lr", "shift", "prior_mean", "prior_precision")
    vectors = {name: torch.full_like(state.momentum, getattr(numbers, name)) for name in names}
    return Coefficients(**{**numbers.__dict__, **vectors})


@needs_kernels
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_the_compiled_update_is_torchs(name: str, shapes: list[tuple[int, ...]]) -> None:
    numbers, results = UPDATES[name], []
    for way in (lambda u, _: u, with_vectors):
        state, gradients, curvatures = state_of(shapes)
        if not numbers.correction:  # squares, else the curvature could become negative
            curvatures = {key: value.square() for key, value in curvatures.items()}
        chosen = way(numbers, state)
        update = state.update(chosen, gradients, curvatures)
        assert update.is_fused == (chosen is numbers)
        before = state.momentum.clone()
        kl, squares = update.inspect()
        assert torch.equal(state.momentum, before)
        for _ in range(3):
            update.apply_()
        vectors = (state.momentum, state.curvature, *([] if state.squares is None else [state.squares]))
        results.append((torch.tensor([kl, squares]), *state.tensors, *vectors))
        assert not torch.equal(state.momentum, before)
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2e-5, atol=2e-6)


@needs_kernels
def test_what_the_compiled_update_does_not_cover_is_done_by_torch() -> None:
    state, gradients, curvatures = state_of([(5, 7), (7,)])
    turned = {**gradients, "0": gradients["0"].t().contiguous().t()}
    update = state.update(UPDATES["vogn"], turned, curvatures)
    assert not update.is_fused
    update.apply_()
    other, gradients, curvatures = state_of([(5, 7), (7,)])
    other.update(UPDATES["vogn"], gradients, curvatures).apply_()
    torch.testing.assert_close(state.tensors, other.tensors)
    double, *gathered = state_of([(5, 7)], torch.float64)
    assert not double.update(UPDATES["vogn"], *gathered).is_fused


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("renew", [0.001, 0.1, 0.999])
@pytest.mark.parametrize("delta", [1e-4, 0.3])
def test_ivons_curvature_stays_positive_whatever_arrives(compiled: bool, renew: float, delta: float) -> None:
    """h + δ at least halves: 1 + x + x²/2 ≥ ½ for all x = (1 − β)(ĥ − h)/(h + δ)."""
    generator = torch.Generator().manual_seed(1)
    size = 4000
    start = 10 ** (6 * torch.rand(size, generator=generator) - 5) - 0.999 * delta * torch.rand(
        size, generator=generator
    )
    assert (start + delta > 0).all()
    state = State({"w": nn.Parameter(torch.zeros(size))}, torch.zeros(size), start.clone())
    numbers = Coefficients(
        lr=0.1, keep=0.9, take=0.1, decay=1 - renew, renew=renew, shift=delta, correction=1.0, coupled=0
    )
    numbers = numbers if compiled else with_vectors(numbers, state)
    zeros = {"w": torch.zeros(size)}
    for step in range(20):
        before = state.curvature + delta
        sign = torch.randint(2, (size,), generator=generator) * 2 - 1
        hostile = sign * 10 ** (18 * torch.rand(size, generator=generator) - 6)  # up to 10¹²
        if step % 2:  # the worst there is: x = −1
            hostile = state.curvature - before / renew
        update = state.update(numbers, zeros, {"w": hostile})
        assert update.is_fused == compiled
        assert math.isfinite(update.inspect()[1])
        update.apply_()
        after = state.curvature + delta
        assert bool(torch.isfinite(after).all())
        # Rounding is relative to the larger of what is added.
        slack = 1e-5 * before + 1e-6 * delta
        assert bool((after >= 0.5 * before - slack).all())
        assert bool((after > 0).all())


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("largest", [1e24, -1e24, 1e38, math.inf, math.nan])
def test_a_curvature_that_would_not_stay_finite_is_seen_before_anything_is_written(
    compiled: bool, largest: float
) -> None:
    """The correction has about the square of what arrives: 10²⁴ is finite, 10⁴⁸ is not."""
    for place in (0, 40, 1499):
        state = State({"w": nn.Parameter(torch.zeros(1500))}, torch.zeros(1500), torch.full((1500,), 1e-3))
        numbers = Coefficients(lr=0.1, keep=0.9, take=0.1, decay=0.9, renew=0.1, shift=1e-3, correction=1.0, coupled=0)
        numbers = numbers if compiled else with_vectors(numbers, state)
        hostile, zeros = torch.zeros(1500), {"w": torch.zeros(1500)}
        assert math.isfinite(state.update(numbers, zeros, {"w": hostile}).inspect()[1])
        hostile[place] = largest
        assert not math.isfinite(state.update(numbers, zeros, {"w": hostile}).inspect()[1])
        assert (state.curvature == 1e-3).all()


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize(("scale", "refused"), [(1e12, False), (1e20, True), (1e30, True)])
def test_ivon_refuses_what_is_too_large_and_goes_on(
    kernels: str, scale: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDO_KERNELS", kernels)
    torch.manual_seed(0)
    posterior = credo.IVON(nn.Linear(3, 2), data_size=10**4, curvature=0.9)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    posterior.step(lambda net: net(x).square().mean())
    before = {key: t.clone() for key, t in posterior.state_dict().items() if isinstance(t, Tensor)}
    expected = pytest.raises(credo.NonFiniteError, match="too large to stay finite at step 1")
    with expected if refused else nullcontext():
        posterior.step(lambda net: scale * net(x).square().mean())
    now = posterior.state_dict()
    assert all(torch.equal(now[key], value) for key, value in before.items()) == refused
    assert math.isfinite(posterior.step(lambda net: net(x).square().mean()).loss)
    assert all(bool(torch.isfinite(t).all()) for t in posterior.state_dict().values() if isinstance(t, Tensor))
