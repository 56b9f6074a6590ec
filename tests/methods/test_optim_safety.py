"""The optimisers resume exactly, can be copied, and survive errors in the middle of a step."""

import copy
import io
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from optim_settings import SETTINGS, Make, assert_same, batches, network, run, tensors
from torch import Tensor
from torch.nn import functional as F
from torch.optim import lr_scheduler

import credo
from credo import optim

WITH_DIAGONAL = {
    **SETTINGS,
    "noisy kfac draws": (
        optim.NoisyKFAC,
        {"lr": 0.05, "draws": 2, "curvature": {"fisher": "sampled", "diagonal": "3.*"}},
    ),
}


@pytest.fixture(params=WITH_DIAGONAL)
def make(request: pytest.FixtureRequest) -> Make:
    kind, options = WITH_DIAGONAL[request.param]
    return lambda model=None, **more: kind(model or network(), data_size=40, **{**options, **more})


# -- resuming --------------------------------------------------------------------------------------------------------


def test_resuming_continues_bit_for_bit(make: Make) -> None:
    """ivon-opt: the step count is not in its state, so the first resumed step is several times too long."""
    data = batches()
    whole = make()
    terms = run(whole, data, lr_scheduler.StepLR(whole, 2, gamma=0.5))

    first = make()
    scheduler = lr_scheduler.StepLR(first, 2, gamma=0.5)
    run(first, data[:3], scheduler)
    file = io.BytesIO()
    parts = {"model": first.posterior.model, "optimizer": first, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    run(first, data[3:])  # what happens after saving is not in the file
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert not [key for key in loaded["optimizer"]["posterior"] if "model." in key]

    second = make(seed=99)
    scheduler = lr_scheduler.StepLR(second, 2, gamma=0.5)
    second.posterior.model.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    assert run(second, data[3:], scheduler) == terms[3:]
    assert_same(tensors(second), tensors(whole))


def test_a_loaded_state_is_a_copy(make: Make) -> None:
    one, other = make(), make()
    run(one, batches(2))
    state = one.state_dict()
    other.load_state_dict(state)
    before = copy.deepcopy(state["posterior"])
    run(one, batches(2))
    run(other, batches(2))
    assert_same(*({k: v for k, v in s.items() if isinstance(v, Tensor)} for s in (state["posterior"], before)))


def test_a_state_of_another_optimiser_is_refused() -> None:
    vogn, ogn = optim.VOGN(network(), data_size=40), optim.OGN(network(), data_size=40)
    with pytest.raises(ValueError, match=r"another optimiser or network.*OGN.*VOGN"):
        vogn.load_state_dict(ogn.state_dict())
    kfac, noisy = optim.KFAC(network(), data_size=40), optim.NoisyKFAC(network(), data_size=40)
    with pytest.raises(ValueError, match=r"another optimiser or network.*KFAC.*NoisyKFAC"):
        noisy.load_state_dict(kfac.state_dict())
    with pytest.raises(ValueError, match="another optimiser"):
        vogn.load_state_dict(torch.optim.Adam(network().parameters()).state_dict())


@pytest.mark.parametrize("kind", [optim.OGN, optim.KFAC])
def test_a_state_of_0_1_is_loaded(kind: Any) -> None:
    """There OGN and K-FAC kept their state in an inner posterior."""
    one, other = (kind(network(), data_size=40) for _ in range(2))
    run(one, batches(2))
    state = one.state_dict()
    inner = {f"engine.{name}": value for name, value in state["posterior"].items()}
    outer = {name: state["posterior"]["_extra_state"][name] for name in ("generator", "steps", "optimizer")}
    other.load_state_dict({**state, "posterior": {**inner, "_extra_state": outer}})
    other.posterior.model.load_state_dict(one.posterior.model.state_dict())
    assert run(one, batches(2)) == run(other, batches(2))
    assert_same(tensors(other), tensors(one))


def test_copies_and_pickles_train_a_network_of_their_own(make: Make) -> None:
    data = batches()
    optimizer = make()
    run(optimizer, data[:2])
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    run(optimizer, data[2:])
    for twin in twins:
        assert twin.posterior.model is not optimizer.posterior.model
        assert twin.posterior.steps == 2
        owned = {id(p) for p in twin.posterior.model.parameters()}
        assert {id(p) for p in twin.param_groups[0]["params"]} == owned
        run(twin, data[2:])
        assert_same(tensors(twin), tensors(optimizer))


# -- errors in the middle --------------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def fail_in_closure(optimizer: Any, x: Tensor, y: Tensor) -> None:
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        loss = F.cross_entropy(optimizer.posterior.model(x), y)
        if calls == optim._wanted(optimizer.posterior):
            raise BrokenError
        return loss

    optimizer.step(closure)


def fail_after_backward(optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        F.cross_entropy(optimizer.posterior.model(x), y).backward()
        raise BrokenError

    optimizer.step(closure)


def fail_in_gather(optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        F.cross_entropy(optimizer.posterior.model(x), y).backward()
        raise BrokenError

    with optimizer.sampled_params(train=True) as net:
        F.cross_entropy(net(x), y).backward()
    optimizer.gather(closure)


def fail_in_block(optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(2):
        with optimizer.sampled_params(train=True) as net:
            F.cross_entropy(net(x), y).backward()
    with optimizer.sampled_params(train=True) as net:
        F.cross_entropy(net(x), y).backward()
        raise BrokenError


def fail_in_prediction(optimizer: Any, x: Tensor, y: Tensor) -> None:
    with optimizer.sampled_params() as net:
        net.eval()(x)
        net.train()
        raise BrokenError


FAILS = [fail_in_closure, fail_after_backward, fail_in_gather, fail_in_block, fail_in_prediction]


@pytest.mark.parametrize("fail", FAILS)
def test_an_exception_leaves_parameters_as_they_were_and_nothing_gathered(make: Make, fail: Make) -> None:
    """ivon-opt: an exception inside a block leaves the noisy weights in the network."""
    optimizer = make()
    data = batches()
    run(optimizer, data[:2])
    before, parameters = tensors(optimizer), dict(optimizer.posterior.model.named_parameters())
    if fail in (
        fail_in_gather,
        fail_in_block,
    ):  # blocks before the one that failed have counted as data for running statistics
        before = {key: value for key, value in before.items() if ".1." not in key}
    with pytest.raises(BrokenError):
        fail(optimizer, *data[2])
    assert_same({key: value for key, value in tensors(optimizer).items() if key in before}, before)
    for name, parameter in optimizer.posterior.model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.grad is None
    with pytest.raises(RuntimeError, match="Nothing was gathered"):
        optimizer.step()
    run(optimizer, data[2:])
    assert optimizer.posterior.steps == 6
    assert all(math.isfinite(t.loss) for t in [optimizer.terms])


def test_a_bad_batch_is_refused_and_forgotten(make: Make) -> None:
    optimizer = make()
    data = batches()
    run(optimizer, data[:2])
    before = tensors(optimizer)
    x, y = data[2][0].clone(), data[2][1]
    x[3, 1] = math.nan
    with pytest.raises(credo.NonFiniteError, match="loss is nan at step 2"):
        run(optimizer, [(x, y)])
    assert_same(tensors(optimizer), before)
    with pytest.raises(credo.NonFiniteError, match=r"gradient of .* is not finite at step 2"):
        optimizer.step(lambda: F.cross_entropy(optimizer.posterior.model(x), y).backward())  # tells no loss
    assert_same(tensors(optimizer), before)
    with optimizer.sampled_params(train=True) as net, credo.frozen_statistics(net):
        F.cross_entropy(net(x), y).backward()
    with pytest.raises(credo.NonFiniteError, match=r"gradient of .* is not finite at step 2"):
        optimizer.step()
    assert_same(tensors(optimizer), before)
    run(optimizer, data[2:])
    assert optimizer.posterior.steps == 6


def test_nothing_nests(make: Make) -> None:
    optimizer = make()
    data = batches()
    run(optimizer, data[:1])
    x, y = data[0]
    before = tensors(optimizer)

    def loss() -> Tensor:
        return F.cross_entropy(optimizer.posterior.model(x), y)

    for outer in (True, False):
        for inner in (True, False):
            with (
                pytest.raises(RuntimeError, match="do not nest"),
                optimizer.sampled_params(train=outer),
                optimizer.sampled_params(train=inner),
            ):
                pass
        with pytest.raises(RuntimeError, match="do not nest"), optimizer.sampled_params(train=outer):
            optimizer.step(loss)
        with pytest.raises(RuntimeError, match="do not nest"), optimizer.sampled_params(train=outer):
            optimizer.gather(loss)
        with pytest.raises(RuntimeError, match="do not nest"), optimizer.sampled_params(train=outer):
            optimizer.step()

    def closure() -> Tensor:
        with optimizer.sampled_params(train=True):
            return loss()

    with pytest.raises(RuntimeError, match="Inside a closure the network is a draw"):
        optimizer.step(closure)
    if optimizer.posterior.is_random:
        with pytest.raises(RuntimeError, match="do not nest"):
            optimizer.step(lambda: (optimizer.posterior(x), loss())[1])
    assert_same(tensors(optimizer), before)
    run(optimizer, data)


def test_a_step_without_passes_is_a_clear_error(make: Make) -> None:
    optimizer = make()
    x, y = batches()[0]
    F.cross_entropy(optimizer.posterior.model(x), y).backward()  # outside: the mean's gradient, not a draw's
    with pytest.raises(RuntimeError, match=r"Nothing was gathered: give step\(\) a closure, or .*sampled_params"):
        optimizer.step()
    # A loop that accumulates by itself and passes a closure for the last part only must not lose the others.
    with pytest.raises(RuntimeError, match="own parameters have gradients"):
        run(optimizer, batches(1))
    with pytest.raises(RuntimeError, match="own parameters have gradients"):
        optimizer.gather(lambda: F.cross_entropy(optimizer.posterior.model(x), y))
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="No gradient has arrived"), optimizer.sampled_params(train=True) as net:
        net(x)
    with pytest.raises(RuntimeError, match="No gradient has arrived"):
        optimizer.step(lambda: F.cross_entropy(optimizer.posterior.model(x), y).item())
    with pytest.raises(RuntimeError, match="No gradient has arrived"):
        optimizer.step(lambda: None)
    for wrong in (lambda: (1.0, 2.0), lambda: optimizer.posterior.model(x)):
        with pytest.raises(ValueError, match="mean loss, one number"):
            optimizer.step(wrong)
    assert optimizer.posterior.steps == 0


def test_importing_credo_is_enough() -> None:
    program = "import credo; print(credo.optim.VOGN.__name__, 'optim' in credo.__all__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["VOGN", "True"]
