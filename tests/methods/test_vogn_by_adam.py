"""VOGN with `update="adam"`: the means take Adam's steps, the noise stays that of the curvature."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo import optim
from credo.core.divergence import _smaller_steps
from credo.doctor.measurements import method_info
from credo.experiments.options import method_with_defaults
from credo.methods.planning import FEWEST_EPOCHS
from credo.training.files.checkpoint import check_fingerprint

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > X[:, 1]).long()
COLD = 1e-20  # neither noise nor prior


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(scale: float = 1.0) -> Callable[[nn.Module], Tensor]:
    return lambda net: scale * F.cross_entropy(net(X), Y)


by_adam = partial(credo.VOGN, update="adam")


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("lr", [None, 3e-3])
def test_without_noise_and_prior_the_means_are_those_of_adam(
    kernels: str, lr: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "0":
        monkeypatch.setenv("CREDO_KERNELS", "0")
    posterior = by_adam(network(), data_size=60, lr=lr, temperature=COLD)
    net = network()
    adam = torch.optim.Adam(net.parameters(), lr or 1.5e-2)
    for _ in range(30):
        posterior.step(loss_of())
        adam.zero_grad()
        loss_of()(net).backward()
        adam.step()
    for ours, theirs in zip(posterior.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The loss seems to be a sum")  # it is 100 means
def test_steps_do_not_depend_on_the_scale_of_the_loss() -> None:
    moved = []
    for scale in (1.0, 100.0):
        posterior = by_adam(network(), data_size=60, temperature=COLD)
        for _ in range(10):
            posterior.step(loss_of(scale))
        moved.append(torch.cat([p.detach().flatten() for p in posterior.model.parameters()]))
    torch.testing.assert_close(*moved, rtol=1e-3, atol=1e-4)


def test_the_noise_is_that_of_the_curvature() -> None:
    posterior = by_adam(network(), data_size=60, temperature=0.5, damping=0.2, prior_precision=3.0)
    for _ in range(5):
        posterior.step(loss_of())
    std = torch.cat([s.flatten() for s in posterior.std().values()])
    assert torch.allclose(std**2, 0.5 / (60 * (posterior.curvature + 0.2) + 0.5 * 3.0))


@pytest.mark.parametrize("make", [credo.VOGN, lambda *given, **options: optim.VOGN(*given, **options).posterior])
def test_a_rate_never_chooses_the_step(make: Any) -> None:
    for lr in (None, 1e-2, 3e-3, {"0.*": 1e-3, "*": 1e-2}):
        given = {} if lr is None else {"lr": lr}
        assert make(network(), data_size=60, **given).squares is None
        assert make(network(), data_size=60, update="natural", **given).squares is None
        assert make(network(), data_size=60, update="adam", **given).squares is not None


@pytest.mark.parametrize(("update", "rate"), [("natural", 1e-2), ("adam", 1.5e-2)])
def test_each_step_has_a_rate_of_its_own(update: str, rate: float) -> None:
    posterior = credo.VOGN(network(), data_size=60, update=update)
    assert posterior.rates == posterior.config()["lr"] == rate
    given = credo.VOGN(network(), data_size=60, update=update, lr=2e-3)
    assert given.rates == given.config()["lr"] == 2e-3
    assert method_info(given).default_lr == rate
    # A run folder has the rate, as those from before there was a choice.
    assert method_with_defaults({"name": "vogn", "update": update})["lr"] == rate
    assert method_with_defaults({"name": "vogn", "update": update, "lr": 2e-3})["lr"] == 2e-3


def test_a_search_finds_a_rate_of_the_chosen_step() -> None:
    made: list[credo.VOGN] = []

    def factory(**given: Any) -> credo.VOGN:
        made.append(by_adam(network(), data_size=60, **given))
        return made[-1]

    found = credo.tune(factory, [(X, Y)], [(X, Y)], epochs=3, trials=4, progress=False)
    assert len({posterior.rates for posterior in made}) == 4
    assert all(posterior.squares is not None for posterior in [*made, found.posterior])


def test_an_unknown_step_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"update.*'natural'"):
        credo.VOGN(network(), data_size=60, update="naturel")


def test_without_an_update_the_step_is_that_of_the_papers() -> None:
    posterior = credo.VOGN(network(), data_size=60, temperature=COLD, damping=0.2)
    net = network()
    momentum = [torch.zeros_like(p) for p in net.parameters()]
    curvature: list[Tensor] = []
    for step in range(4):
        posterior.step(loss_of())
        rows = [
            torch.autograd.grad(F.cross_entropy(net(x[None]), y[None]), list(net.parameters()))
            for x, y in zip(X, Y, strict=True)
        ]
        for i, parameter in enumerate(net.parameters()):
            each = torch.stack([row[i] for row in rows])
            momentum[i] = 0.9 * momentum[i] + each.mean(0)
            square = each.square().mean(0)
            curvature[i : i + 1] = [square if step == 0 else 0.999 * curvature[i] + 0.001 * square]
            parameter.data -= 1e-2 * momentum[i] / (curvature[i] + 0.2)
    for ours, theirs in zip(posterior.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("update", "plan", "epochs", "part"),
    [
        ("natural", None, 10, 0.5),
        ("natural", "cold", 100, 0.5),
        ("adam", None, FEWEST_EPOCHS - 1, 0.9),
        ("adam", None, FEWEST_EPOCHS, 0.5),
        ("adam", "cold", 100, 0.9),
        ("adam", "warm", 100, 0.5),
    ],
)
def test_only_adams_temperature_rises_late(update: str, plan: str | None, epochs: int, part: float) -> None:
    posterior = credo.VOGN(network(), data_size=60, update=update)
    if plan is None:
        posterior.plan_training_(steps=1000, epochs=epochs)
    else:
        posterior.plan_as_(plan, steps=1000, epochs=epochs)
    assert posterior.config()["temperature"]["steps"] == part * 1000


def test_advice_against_divergence_is_of_the_rate_alone() -> None:
    assert _smaller_steps(by_adam(network(), data_size=60)) == ["lr=0.0015"]
    assert _smaller_steps(by_adam(network(), data_size=60, lr=1e-2)) == ["lr=0.001"]


def test_squares_are_saved_and_pruned(tmp_path: Path) -> None:
    posterior = by_adam(network(), data_size=60, temperature=0.1)
    posterior.step(loss_of())
    credo.save(posterior, tmp_path / "one.safetensors")
    loaded = credo.load(tmp_path / "one.safetensors", network())
    assert isinstance(loaded, credo.VOGN)
    assert posterior.squares is not None
    assert loaded.squares is not None
    assert torch.equal(loaded.squares, posterior.squares)
    kept = posterior.squares.numel() - 4
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in posterior.model.named_parameters()}
    masks["0.weight"].view(-1)[:4] = False
    posterior.keep_(masks)
    assert posterior.squares.numel() == kept
    posterior.step(loss_of())


@pytest.mark.parametrize(("update", "resumes"), [("natural", True), ("adam", False)])
def test_a_checkpoint_from_before_there_was_a_choice_is_of_the_natural_step(update: str, resumes: bool) -> None:
    options = credo.VOGN(network(), data_size=60, lr=1e-2).config()
    before = {name: value for name, value in options.items() if name != "update"}
    state = {"fingerprint": {"posterior": {"method": "VOGN", "options": before}}}
    now = credo.VOGN(network(), data_size=60, lr=1e-2, update=update).config()
    wanted = {"posterior": {"method": "VOGN", "options": now, "members": {}}}
    with nullcontext() if resumes else pytest.raises(credo.FileFormatError, match="update: 'natural' there"):
        check_fingerprint(Path("checkpoint.pt"), state, wanted)
