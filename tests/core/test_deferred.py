"""Checks of several steps at once, numbers that are read later, and how much a step asks of an accelerator."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.launches import INVERTING, counted, step_of
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core import deferred
from credo.core.deferred import Later

METHODS = ("MAP", "BBB", "VOGN", "IVON", "OGN", "NodeBNN", "KFAC", "NoisyKFAC")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("CREDO_KERNELS", "0")
    return lambda choice: monkeypatch.setenv("CREDO_CHECKS", choice)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)) for _ in range(count)
    ]


def make(method: str) -> Any:
    return getattr(credo, method)(network(), data_size=100, seed=3)


def step(posterior: Any, batch: tuple[Tensor, Tensor]) -> Any:
    return posterior.step(lambda net: F.cross_entropy(net(batch[0]), batch[1]))


def same(first: Any, second: Any) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs if isinstance(a, Tensor))


@pytest.mark.parametrize("method", METHODS)
def test_deferring_changes_no_result(method: str, checks: Callable[[str], None]) -> None:
    posteriors, terms = [], []
    for choice in ("immediate", "deferred"):
        checks(choice)
        posteriors.append(make(method))
        found = [step(posteriors[-1], batch) for batch in batches(6)]
        terms.append([(t.loss, t.nll, t.penalty, t.kl) for t in found])
    assert same(*posteriors)
    assert terms[0] == terms[1]
    assert all(isinstance(value, float) for value in terms[1][0][:3])


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_step_is_named_and_undone(method: str, checks: Callable[[str], None]) -> None:
    checks("deferred")
    posterior = make(method)
    for batch in batches(2):
        step(posterior, batch)
    posterior.settle_checks()
    before = copy.deepcopy(posterior)
    given = batches(10)
    given[3][0][5, 2] = torch.nan
    for batch in given:
        step(posterior, batch)
    with pytest.raises(credo.NonFiniteError, match=r"loss is nan at step 5,.* before step 2\."):
        posterior.settle_checks()
    assert posterior.steps == 2
    assert same(posterior, before)  # weights, running statistics, optimiser
    again, expected = step(posterior, batches(1)[0]), step(before, batches(1)[0])
    assert again.loss == expected.loss  # and the generator
    assert same(posterior, before)


def test_a_bad_update_is_found_in_the_weights(checks: Callable[[str], None]) -> None:
    checks("deferred")
    posterior = credo.MAP(nn.Linear(1, 1, bias=False), data_size=8, likelihood="gaussian")
    step_with = posterior.step
    before = posterior.model.weight.detach().clone()
    # The loss is finite, its gradient is not.
    step_with(lambda net: (net.weight - net.weight.detach()).abs().sqrt().sum() + 1.0)
    with pytest.raises(credo.NonFiniteError, match="update of step 0 is not finite"):
        posterior.settle_checks()
    assert torch.equal(posterior.model.weight, before)


USES: dict[str, Callable[[Any], object]] = {
    "predict": lambda posterior: credo.predict(posterior, batches(1)[0][0], draws=2),
    "state_dict": lambda posterior: posterior.state_dict(),
    "deepcopy": copy.deepcopy,
    "many steps": lambda posterior: [step(posterior, batch) for batch in batches(deferred.EVERY - 1)],
}


@pytest.mark.parametrize("use", USES)
def test_nothing_goes_on_with_a_failed_step(use: str, checks: Callable[[str], None]) -> None:
    checks("deferred")
    posterior = make("BBB")
    x, y = batches(1)[0]
    step(posterior, (x * torch.nan, y))
    with pytest.raises(credo.NonFiniteError, match="loss is nan at step 0"):
        USES[use](posterior)
    assert posterior.steps == 0


def test_fit_checks_at_the_end_of_an_epoch(checks: Callable[[str], None]) -> None:
    checks("deferred")
    given = batches(4)
    given[2][0][0, 0] = torch.nan
    with pytest.raises(credo.NonFiniteError, match="loss is nan at step 2"):
        credo.fit(make("BBB"), given, epochs=1)


def test_divergence_is_still_seen(checks: Callable[[str], None]) -> None:
    checks("deferred")
    posterior = make("MAP")
    scales = [1.0, *[1000.0] * 30]
    batch = batches(1)[0]
    for scale in scales:
        posterior.step(lambda net, scale=scale: F.cross_entropy(net(batch[0]), batch[1]) * scale)
    with pytest.warns(credo.DivergenceWarning, match="Training diverges"):
        posterior.settle_checks()


def test_a_wrong_choice_is_named(checks: Callable[[str], None]) -> None:
    checks("never")
    with pytest.raises(ValueError, match=r"CREDO_CHECKS.*never"):
        step(make("MAP"), batches(1)[0])


def test_numbers_are_read_once_and_only_when_needed() -> None:
    reads: list[int] = []

    def read() -> float:
        reads.append(1)
        return 2.0

    number = Later(read)
    result = (1.0 + number) * number / 2.0 - number
    assert not reads
    assert float(result) == 1.0
    assert float(number) == 2.0
    assert len(reads) == 1
    assert math.isnan(float(Later(torch.tensor(math.nan)) * 0.0))


# -- launches and synchronisations ---------------------------------------------------------------------------------


# Computing operators of a step of LeNet-5 on a batch of 32; fused Adam has 39 of them.
MOST = {"MAP": 36, "BBB": 54, "IVON": 54, "VOGN": 74, "OGN": 67, "NodeBNN": 85, "NoisyKFAC": 124}


@pytest.mark.parametrize("method", MOST)
def test_a_step_launches_few_operators_and_never_waits(method: str, checks: Callable[[str], None]) -> None:
    checks("deferred")
    count = counted(step_of(method))
    assert count.waiting == 0, count.seen
    assert count.computing <= MOST[method], count.seen


def test_new_inverses_are_less_than_five_steps_of_adam_and_wait_once(checks: Callable[[str], None]) -> None:
    checks("deferred")
    count = counted(step_of("NoisyKFAC"), INVERTING)
    assert count.computing <= 192, count.seen
    assert count.waiting == 1, count.seen


def test_the_count_sees_who_waits(checks: Callable[[str], None]) -> None:
    checks("immediate")
    posterior = make("MAP")
    batch = batches(1)[0]
    assert counted(lambda: step(posterior, batch)).waiting > 0
    checks("deferred")
    assert counted(lambda: step(posterior, batch)).waiting == 0
    assert counted(lambda: step(posterior, batch).loss).waiting > 0
