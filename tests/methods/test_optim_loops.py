"""The optimisers in other people's loops: odd parameters, autocast, what torch expects, ivon-opt's names and flaws."""

import math
from typing import Any

import pytest
import torch
from optim_settings import SETTINGS, Make, assert_same, batches, network, run, tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import credo
from credo import optim


@pytest.fixture(params=SETTINGS)
def make(request: pytest.FixtureRequest) -> Make:
    kind, options = SETTINGS[request.param]
    return lambda model=None, **more: kind(model or network(), data_size=40, **{**options, **more})


# -- odd parameters --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """An unused parameter, a layer used now and then, a frozen one, two precisions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3).double()
        self.frozen, self.unused = nn.Linear(6, 6).requires_grad_(False), nn.Parameter(torch.ones(5))
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.first(x)).relu()
        return self.last((self.sometimes(hidden) if self.use else hidden).double())


def test_unused_frozen_and_mixed_parameters(make: Make) -> None:
    """ivon-opt: AttributeError for an unused parameter, refuses several dtypes."""
    optimizer = make(Odd())
    model = optimizer.posterior.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run(optimizer, batches(2))
    middle = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.use = False
    run(optimizer, batches(2))
    model.use = True
    run(optimizer, batches(2))
    assert math.isfinite(optimizer.terms.loss)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == before[name].dtype, name
        assert torch.equal(parameter, before[name]) == name.startswith("frozen"), name  # the prior pulls the unused
        assert bool(torch.isfinite(parameter).all())
        if not name.startswith("frozen"):
            assert not torch.equal(parameter, middle[name]), name
    # All that happens to a parameter without gradients is the prior's pull: to zero, and never beyond.
    assert bool(((model.unused > 0) & (model.unused < 1)).all())


def test_autocast(make: Make) -> None:
    """In bfloat16 the step is the same up to its rounding; parameters and state stay float32."""
    low, full = make(), make()
    data = batches(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(low, data[:2])
        with low.sampled_params(train=True) as net:
            assert net(data[2][0]).dtype is torch.bfloat16
            F.cross_entropy(net(data[2][0]), data[2][1]).backward()
            if isinstance(low, optim.IVON):
                assert net[0].weight.grad.dtype is torch.float32
        low.step()
    run(full, data[:2])
    with full.sampled_params(train=True) as net:
        F.cross_entropy(net(data[2][0]), data[2][1]).backward()
    full.step()
    start = torch.cat([p.detach().reshape(-1) for p in network().parameters()])
    moves = [torch.cat([p.detach().reshape(-1) for p in o.posterior.model.parameters()]) - start for o in (low, full)]
    assert moves[0].dtype is torch.float32
    assert F.cosine_similarity(moves[0], moves[1], dim=0) > 0.95
    assert {value.dtype for value in tensors(low).values() if value.is_floating_point()} == {torch.float32}


# -- what torch's optimisers have ------------------------------------------------------------------------------------


def test_zero_grad_and_repr(make: Make) -> None:
    optimizer = make()
    x, y = batches()[0]
    with optimizer.sampled_params(train=True) as net:
        F.cross_entropy(net(x), y).backward()
        optimizer.zero_grad()  # late: the draw's gradients are not among the network's
    optimizer.step()
    F.cross_entropy(optimizer.posterior.model(x), y).backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in optimizer.posterior.model.parameters())
    lines = repr(optimizer).splitlines()
    assert lines[0].startswith(type(optimizer).__name__)
    assert f"lr: {optimizer.param_groups[0]['lr']}" in repr(optimizer)


def test_hooks_of_torch_run(make: Make) -> None:
    optimizer, seen = make(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, batches(1))
    assert seen == ["before", "after"]


def test_further_groups_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"one group: give values by name"):
        make().add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_only_posteriors_that_gather_are_driven() -> None:
    with pytest.raises(ValueError, match="BBB has a torch optimiser of its own"):
        optim.PosteriorOptimizer(credo.BBB(network(), data_size=40))
    with pytest.raises(ValueError, match="lr=0 would stay 0"):
        optim.IVON(network(), data_size=40, lr=0.0)
    with pytest.raises(ValueError, match="needs a network"):
        optim.IVON(network().parameters(), data_size=40)


def test_clipping_inside_a_block_acts_on_the_draws_gradients(make: Make) -> None:
    optimizer = make()
    x, y = batches()[0]
    with optimizer.sampled_params(train=True) as net:
        (100 * F.cross_entropy(net(x), y)).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 1
    gathered = optimizer.posterior._gathered.gradients.values()
    assert torch.cat([g.reshape(-1) for g in gathered]).norm().item() == pytest.approx(0.1, rel=1e-4)
    optimizer.step()


def test_a_gradient_scaler_sees_no_gradients() -> None:
    optimizer, scaler = optim.IVON(network(), data_size=40), torch.amp.GradScaler("cpu")
    x, y = batches()[0]
    with optimizer.sampled_params(train=True) as net:
        scaler.scale(F.cross_entropy(net(x), y)).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    assert optimizer.posterior.steps == 0


# -- defects of ivon-opt and torchsso --------------------------------------------------------------------------------


def test_the_users_random_numbers_are_left_alone(make: Make) -> None:
    """torchsso reseeds torch's generator at every step, and with it dropout, augmentation and shuffling."""
    optimizer = make()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for i, batch in enumerate(batches(3)):
        run(optimizer, [batch])
        assert torch.rand(1) == expected[i]


def test_the_reported_nll_is_the_mean_over_draws() -> None:
    """torchsso divides by the number of accumulation steps instead."""
    x, y = batches()[0]
    for kind in (optim.VOGN, optim.IVON, optim.NoisyKFAC):
        optimizer = kind(network(), data_size=40, draws=3)
        run(optimizer, batches(1))  # before the first step, some have no noise yet
        losses: list[float] = []

        def closure(x: Tensor = x, y: Tensor = y, optimizer: Any = optimizer, losses: Any = losses) -> Tensor:
            loss = F.cross_entropy(optimizer.posterior.model(x), y)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        assert len(set(losses)) == 3
        assert optimizer.terms.nll == pytest.approx(sum(losses) / 3, rel=1e-6)


class Own(nn.Module):
    """Parameters of its own, in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x + self.offset


@pytest.mark.parametrize("kind", [optim.VOGN, optim.OGN, optim.KFAC, optim.NoisyKFAC, optim.IVON])
def test_regression_with_any_module(kind: type) -> None:
    """torchsso has a softmax inside and allows no module beside its own."""
    x = torch.linspace(-1, 1, 50).unsqueeze(1)
    clip = {} if kind in (optim.VOGN, optim.OGN) else {"clip": None}
    noise = credo.GaussianNoise(0.5)
    optimizer = kind(Own(), data_size=50, lr=0.05, likelihood=noise, curvature=0.9, **clip)
    model, nll = optimizer.posterior.model, optimizer.posterior.likelihood.nll
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        optimizer.step(lambda: nll(model(x), 3 * x - 1))
        scheduler.step()
    assert model.slope.item() == pytest.approx(3.0, abs=0.2)
    assert model.offset.item() == pytest.approx(-1.0, abs=0.2)
    prediction = credo.predict(optimizer.posterior, x, draws=8)
    assert (prediction.mean - (3 * x - 1)).abs().max() < 0.3


# -- ivon-opt's names ------------------------------------------------------------------------------------------------


def test_ivon_opts_names_mean_what_they_mean_there() -> None:
    theirs = optim.IVON(
        network(), lr=0.1, ess=4000.0, hess_init=0.5, beta1=0.8, beta2=0.99, weight_decay=1e-3, mc_samples=2,
        hess_approx="price", clip_radius=0.3, sync=False, debias=True, rescale_lr=True,
    )  # fmt: skip
    ours = optim.IVON(
        network(), lr=0.1, data_size=4000, curvature={"init": 0.5, "decay": 0.99, "estimator": "price"}, momentum=0.8,
        draws=2, prior_precision=4.0, clip=0.3,
    )  # fmt: skip
    assert run(theirs, batches()) == run(ours, batches())
    assert_same(tensors(theirs), tensors(ours))
    tempered = optim.IVON(network(), data_size=40, ess=400.0, clip_radius=math.inf, hess_approx="gradsq").posterior
    assert (tempered.temperature, tempered.config()["clip"]) == (0.1, None)
    assert tempered.estimator == "squares"
    half = optim.IVON(network(), ess=12.5).posterior
    assert half.effective_size == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Give data_size"),
        ({"ess": 0.0}, "ess=0.0 must be positive"),
        ({"ess": 40.0, "temperature": 1.0}, "without temperature"),
        ({"ess": 40.0, "beta1": 0.9, "momentum": 0.9}, "beta1 is ivon-opt's name for momentum"),
        ({"ess": 40.0, "sync": True}, r"leave it out and call credo\.distribute\(optimizer\.posterior\)"),
        ({"ess": 40.0, "hess_approx": "gradsqr"}, "Unknown curvature.estimator 'gradsqr'"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.IVON(network(), **options)
