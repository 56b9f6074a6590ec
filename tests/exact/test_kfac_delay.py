"""Inverses that a thread makes: which step takes them, and that nothing but the step decides it."""

import copy
import io
import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from kfac_small import mlp, nll, same
from torch import Tensor

from credo.core.kronecker.factors import factored_dampings, inverse_roots
from credo.methods.kfac import delayed as module
from credo.methods.kfac.blocks import KroneckerBlock
from credo.methods.kfac.delayed import Delayed
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC

EVERY, DELAY = 4, 3
LATER = {"inverse_every": EVERY, "inverse_delay": DELAY}
KINDS: dict[str, dict[str, Any]] = {"factors": LATER, "eigenvectors": {**LATER, "eigenbasis": True}}


def posterior(seed: int = 0, method: Any = NoisyKFAC, **curvature: Any) -> Any:
    return method(mlp(seed), data_size=20, seed=seed, curvature={**LATER, **curvature})


def test_inverses_are_those_of_the_factors_so_many_steps_before() -> None:
    ours = posterior()
    block = next(b for b in ours.blocks if isinstance(b, KroneckerBlock))
    factors: list[tuple[Tensor, Tensor]] = []
    new = []
    for step in range(14):
        before = block.output_root.clone()
        ours.step(nll)
        factors.append((block.inputs.clone(), block.outputs.clone()))
        if torch.equal(block.output_root, before):
            continue
        new.append(step)
        of = step if step < EVERY else step - DELAY
        a, g = factors[of]
        shares = factored_dampings([a], [g], [1e-2 + 1 / 20])
        roots = inverse_roots([a, g], [shares[0][0], shares[1][0]])
        torch.testing.assert_close([block.input_root, block.output_root], roots)
    # At once in the first four steps; of steps 4 and 8 three steps later, of step 12 not yet.
    assert new == [0, 1, 2, 3, 7, 11]


def test_a_delay_of_a_whole_period_takes_and_begins_in_one_step() -> None:
    ours = posterior(inverse_delay=EVERY)
    block = next(b for b in ours.blocks if isinstance(b, KroneckerBlock))
    new = []
    for step in range(14):
        before = block.output_root.clone()
        ours.step(nll)
        new += [] if torch.equal(block.output_root, before) else [step]
    assert new == [0, 1, 2, 3, 8, 12]


@pytest.mark.parametrize("kind", KINDS)
def test_how_long_the_thread_takes_does_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, slow = posterior(**KINDS[kind]), posterior(**KINDS[kind])
    for _ in range(13):
        plain.step(nll)
    run = Delayed._run
    threads = []

    def slowly(self: Delayed) -> None:
        threads.append(threading.current_thread().name)
        time.sleep(0.05)
        run(self)

    monkeypatch.setattr(Delayed, "_run", slowly)
    for _ in range(13):
        slow.step(nll)
    assert len(threads) == 3
    assert "MainThread" not in threads
    assert same(plain.state_dict(), slow.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [3, 5, 6, 7, 8, 9])
def test_resuming_while_the_thread_works_is_exact(kind: str, stop: int) -> None:
    whole, half, rest = posterior(**KINDS[kind]), posterior(**KINDS[kind]), posterior(7, **KINDS[kind])
    for _ in range(13):
        whole.step(nll)
    for _ in range(stop):
        half.step(nll)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    rest.load_state_dict(torch.load(file, weights_only=True))
    for ours in (half, rest):  # who has saved goes on as if nothing had been
        while ours.steps < 13:
            ours.step(nll)
        assert same(whole.state_dict(), ours.state_dict())


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_copies_have_inverses_of_their_own_that_are_the_same(way: str) -> None:
    ours = posterior()
    for _ in range(6):
        ours.step(nll)
    other = copy.deepcopy(ours) if way == "copy" else pickle.loads(pickle.dumps(ours))
    for one in (ours, other):
        for _ in range(3):
            one.step(nll)
    assert same(ours.state_dict(), other.state_dict())


def test_a_state_from_before_has_nothing_to_take() -> None:
    ours = posterior()
    for _ in range(6):
        ours.step(nll)
    state = ours.state_dict()
    state["_extra_state"] = {k: v for k, v in state["_extra_state"].items() if k != "delayed"}
    ours.load_state_dict(state)
    for _ in range(6):
        ours.step(nll)


def test_an_error_of_the_thread_is_raised_by_the_step_that_takes_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = posterior(method=KFAC)
    for _ in range(4):
        ours.step(nll)

    def fails(*_: Any) -> None:
        raise ArithmeticError("no inverse")

    monkeypatch.setattr("credo.methods.kfac.stepper.inverted", fails)
    for _ in range(3):
        ours.step(nll)
    before = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    with pytest.raises(ArithmeticError, match="no inverse"):
        ours.step(nll)
    assert same(before, {name: p.detach() for name, p in ours.model.named_parameters()})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_makes_what_its_thread_would_have() -> None:
    ready = threading.Event()
    main = threading.get_ident()

    def make() -> module.Made:
        if threading.get_ident() != main:
            ready.wait(5)
        return [(torch.ones(1),)]

    waiting = Delayed(0, make)
    child = os.fork()
    if not child:
        os._exit(0 if len(waiting.result()) == 1 else 1)
    _, status = os.waitpid(child, 0)
    ready.set()
    waiting.result()
    assert status == 0


def test_a_delay_longer_than_the_period_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inverse_delay=5 is more than curvature\.inverse_every=4"):
        posterior(inverse_delay=5)
    with pytest.raises(ValueError, match="inverse_delay=-1"):
        posterior(inverse_delay=-1)
