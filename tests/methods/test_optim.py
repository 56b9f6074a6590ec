"""The optimisers make the steps of their posteriors in loops that others wrote: closures, blocks, schedules, resume."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import credo
from credo import optim

SETTINGS: dict[str, tuple[type, dict[str, Any]]] = {
    "vogn": (optim.VOGN, {"lr": 0.05, "curvature": {"init": 0.5}}),
    "vogn first at mean": (optim.VOGN, {"lr": 0.05, "draws": 2, "momentum": {"averaged": True, "correction": False}}),
    "ogn": (optim.OGN, {"lr": 0.05}),
    "kfac": (optim.KFAC, {"lr": 0.05, "curvature": {"inverse_every": 2}}),
    "noisy kfac": (optim.NoisyKFAC, {"lr": 0.05, "curvature": {"factor_every": 2, "inverse_every": 3}}),
    "noisy kfac draws": (
        optim.NoisyKFAC,
        {"lr": 0.05, "draws": 2, "curvature": {"fisher": "sampled", "diagonal": "*last*"}},
    ),
    "ivon": (optim.IVON, {"lr": 0.3, "curvature": 0.9}),
    "ivon draws": (optim.IVON, {"lr": 0.3, "curvature": 0.9, "draws": 3, "random": "all"}),
}


class Net(nn.Module):
    """BatchNorm, a layer that is used twice, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.unused = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(2, 2)
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.twice(self.norm(self.first(x)).relu()).relu()))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    size = {"generator": generator}
    return [(torch.randn(12, 4, **size), torch.randint(3, (12,), **size)) for _ in range(count)]


@pytest.fixture(params=SETTINGS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`make()` gives an optimiser; `make.posterior()` the posterior of the same settings."""
    kind, options = SETTINGS[request.param]

    def build(**more: Any) -> Any:
        return kind(network(), data_size=40, seed=3, **{**options, **more})

    build.posterior = lambda: getattr(credo, kind.__name__)(network(), data_size=40, seed=3, **options)
    return build


def state(posterior: Any) -> dict[str, Any]:
    return copy.deepcopy(dict(posterior.state_dict()))


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            assert_same(value, b[key])
        else:
            same = torch.equal(value, b[key]) if isinstance(value, Tensor) else value == b[key]
            assert same, key


# -- the ways of making a step -------------------------------------------------------------------------------------


def without_backward(optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = optimizer.step(lambda: F.cross_entropy(optimizer.posterior.model(x), y))
    assert isinstance(loss, Tensor)


def with_backward(optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(optimizer.posterior.model(x), y)
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), Tensor)


def returning_a_number(optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> float:
        loss = F.cross_entropy(optimizer.posterior.model(x), y)
        loss.backward()
        return loss.item()

    assert isinstance(optimizer.step(closure), float)


def without_grad_mode(optimizer: Any, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        without_backward(optimizer, x, y)


def gathered_before(optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = optimizer.gather(lambda: F.cross_entropy(optimizer.posterior.model(x), y))
    assert isinstance(loss, Tensor)
    optimizer.step()


WAYS = [without_backward, with_backward, returning_a_number, without_grad_mode, gathered_before]


@pytest.mark.part(10)
@pytest.mark.parametrize("way", WAYS)
def test_a_closure_makes_the_posteriors_step_bit_for_bit(make: Any, way: Callable[..., None]) -> None:
    optimizer, posterior = make(), make.posterior()
    for x, y in batches():
        way(optimizer, x, y)
        terms = posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))
        assert optimizer.terms == terms
    assert_same(state(optimizer.posterior), state(posterior))
    assert optimizer.posterior.model.norm.num_batches_tracked == 6
    assert all(p.grad is None for p in optimizer.posterior.model.parameters())


def test_a_closure_may_return_nothing_if_it_called_backward(make: Any) -> None:
    optimizer, posterior = make(), make.posterior()
    x, y = batches()[0]
    assert optimizer.step(lambda: F.cross_entropy(optimizer.posterior.model(x), y).backward()) is None
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert_same(state(optimizer.posterior), state(posterior))
    assert math.isnan(optimizer.terms.nll)


def test_a_block_makes_the_posteriors_step_bit_for_bit(make: Any) -> None:
    optimizer, posterior = make(), make.posterior()
    model = optimizer.posterior.model
    for x, y in batches():
        draws = optim._wanted(optimizer.posterior)
        for count in range(draws):
            inner = credo.frozen_statistics(model) if count else torch.enable_grad()
            with inner, optimizer.sampled_params(train=True) as net:
                optimizer.zero_grad()
                assert net is model
                F.cross_entropy(model(x), y).backward()
        assert optimizer.step() is None
        posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))
    assert_same(state(optimizer.posterior), state(posterior))


def test_an_empty_closure_after_blocks_adds_nothing(make: Any) -> None:
    """Lightning gives one to every step() of a manual loop."""
    with_one, without = make(), make()
    for x, y in batches(3):
        for optimizer in (with_one, without):
            with optimizer.sampled_params(train=True) as net:
                F.cross_entropy(net(x), y).backward()
        assert with_one.step(lambda: None) is None
        without.step()
    assert_same(state(with_one.posterior), state(without.posterior))


class Reading(nn.Module):
    """Reads a layer's weight without calling the layer, which only a pass can show."""

    def __init__(self, *, called: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.called = nn.Linear(4, 6), nn.Linear(6, 1), called

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden) if self.called else F.linear(hidden, self.last.weight, self.last.bias)


# The second needs a diagonal there: Kronecker factors do not see who reads a weight.
UNUSUAL: dict[str, dict[str, Any]] = {
    "VOGN": {"curvature": {"init": 0.5}},
    "NoisyKFAC": {"curvature": {"diagonal": "last.*"}},
}


def regression(kind: str, model: nn.Module) -> dict[str, Any]:
    noise = credo.GaussianNoise(0.5, learn=True)
    return {"model": model, "data_size": 40, "lr": 0.05, "likelihood": noise, **UNUSUAL[kind]}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_network_is_run_again_with_the_same_draw_and_counted_once(kind: str) -> None:
    made = [getattr(place, kind)(**regression(kind, Reading(called=False))) for place in (optim, credo)]
    optimizer, posterior = made
    usual = getattr(credo, kind)(**regression(kind, Reading(called=True)))
    calls = 0
    for x, _ in batches(3):
        y = x[:, :1].sin()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal calls
            calls += 1
            return optimizer.posterior.likelihood.nll(optimizer.posterior.model(x), y)

        optimizer.step(closure)
        for one in (posterior, usual):
            one.step(lambda net, x=x, y=y, one=one: one.likelihood.nll(net(x), y))
    assert calls == 4
    assert_same(state(optimizer.posterior), state(posterior))
    for key, value in usual.state_dict().items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(optimizer.posterior.state_dict()[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_block_that_must_be_run_again_says_so(kind: str) -> None:
    optimizer = getattr(optim, kind)(**regression(kind, Reading(called=False)))
    x = batches()[0][0]

    def block() -> None:
        with optimizer.sampled_params(train=True) as net:
            optimizer.posterior.likelihood.nll(net(x), x[:, :1].sin()).backward()

    with pytest.raises(RuntimeError, match="run the block again"):
        block()
    block()
    optimizer.step()
    assert optimizer.posterior.steps == 1


def test_prediction_blocks_are_draws_and_leave_nothing(make: Any) -> None:
    optimizer = make()
    x, y = batches()[0]
    without_backward(optimizer, x, y)
    before = state(optimizer.posterior.model)
    optimizer.posterior.eval()
    with optimizer.sampled_params() as net, torch.no_grad():
        first = net(x)
    with optimizer.sampled_params() as net, torch.no_grad():
        second = net(x)
    assert torch.equal(first, second) == (not optimizer.posterior.is_random)
    assert_same(state(optimizer.posterior.model), before)
    with pytest.raises(RuntimeError, match="Nothing was gathered"):
        optimizer.step()


# -- schedules -------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8, cycle_momentum=False),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[2],
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@pytest.mark.part(10)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step"
)  # SequentialLR of torch 2.6 gives it itself
def test_torch_schedulers_change_the_rate(make: Any, schedule: str) -> None:
    """They are to the optimiser what `lr_scale` is to the posterior."""
    optimizer, posterior = make(), make.posterior()
    base = optimizer.param_groups[0]["lr"]
    assert base == posterior.config()["lr"]
    scheduler = SCHEDULES[schedule](optimizer)
    rates = []
    for x, y in batches():
        without_backward(optimizer, x, y)
        rates.append(optimizer.param_groups[0]["lr"])
        posterior.lr_scale = rates[-1] / base
        posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))
        scheduler.step(*([1.0] if schedule == "plateau" else []))
    assert_same(state(optimizer.posterior), state(posterior))
    assert len(set(rates)) > 2


def test_a_cycled_momentum_is_refused_by_torch_since_it_could_not_be_heard() -> None:
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(optim.VOGN(network(), data_size=40), 0.2, total_steps=8)


@pytest.mark.parametrize("kind", ["VOGN", "KFAC", "NoisyKFAC"])
def test_rates_by_name_have_a_group_rate_that_is_a_factor(kind: str) -> None:
    rates = {"last.*": 0.0, "*": 0.05}
    optimizer, posterior = (getattr(place, kind)(network(), data_size=40, lr=rates) for place in (optim, credo))
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.param_groups[0]["lr"] = posterior.lr_scale = 0.5
    before = state(posterior.model)
    for x, y in batches():
        without_backward(optimizer, x, y)
        posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))
    assert_same(state(optimizer.posterior), state(posterior))
    assert torch.equal(posterior.model.last.weight, before["last.weight"])
    assert not torch.equal(posterior.model.first.weight, before["first.weight"])


# -- gradient accumulation --------------------------------------------------------------------------------------------


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("kind", ["OGN", "VOGN", "KFAC", "NoisyKFAC"])
def test_equal_parts_of_a_batch_at_one_point_are_the_whole_batch(kind: str) -> None:
    """Without noise always, with noise where passes are at the mean: all that is gathered are means over examples."""
    x, y = batches()[0]
    whole, parts = (getattr(optim, kind)(plain(), data_size=40, lr=0.05) for _ in range(2))
    for _ in range(1 if whole.posterior.is_random else 3):
        whole.step(lambda: F.cross_entropy(whole.posterior.model(x.double()), y))
        for rows in range(0, 12, 4):
            with parts.sampled_params(train=True) as net:
                F.cross_entropy(net(x[rows : rows + 4].double()), y[rows : rows + 4]).backward()  # not divided
        parts.step()
    found, wanted = state(parts.posterior), state(whole.posterior)
    for key, value in wanted.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["VOGN", "NoisyKFAC", "IVON"])
def test_blocks_on_parts_are_gathered_passes_each_with_a_draw_of_its_own(kind: str) -> None:
    """Three blocks and a step = three `gather`s and an `update`; on one batch = one step of three draws."""
    options: dict[str, Any] = {"data_size": 40, **({} if kind == "NoisyKFAC" else {"curvature": {"init": 0.5}})}
    method, x, y = getattr(credo, kind), *batches()[0]
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    for rows in (parts, [slice(0, 12)] * 3):
        optimizer = getattr(optim, kind)(plain(), **options)
        posterior = method(plain(), **options, draws=1 if rows is parts else 3)
        for one in (optimizer.posterior, posterior):  # so that all have a curvature, and noise with it
            one.gather(lambda net: F.cross_entropy(net(x.double()), y))
            one.update()
        for part in rows:
            with optimizer.sampled_params(train=True) as net:
                F.cross_entropy(net(x[part].double()), y[part]).backward()
            if rows is parts:
                posterior.gather(lambda net, part=part: F.cross_entropy(net(x[part].double()), y[part]))
        optimizer.step()
        if rows is parts:
            posterior.update()
        else:
            posterior.step(lambda net: F.cross_entropy(net(x.double()), y))
        assert_same(state(optimizer.posterior), state(posterior))
