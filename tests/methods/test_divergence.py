"""Training that goes astray with finite numbers is said, once, with the arguments that help; nothing else changes."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.divergence import ABOVE_START, STEPS_ABOVE, TrainingWatch


def gap(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A hundred points of a wave on both sides of a gap."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(100, 1, generator=generator) + 0.5
    x[:50] *= -1
    return x, torch.sin(3 * x) + 0.1 * torch.randn(100, 1, generator=generator)


def network(inputs: int = 1, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, outputs))


def ivon(**options: Any) -> credo.IVON:
    unsafe = {"lr": 0.1, "clip": None, "temperature": 1.0, "prior": 1.0, "curvature": 0.9999}
    return credo.IVON(network(), data_size=100, likelihood=credo.GaussianNoise(0.1), **{**unsafe, **options})


def stepped(posterior: credo.Posterior, steps: int) -> None:
    x, y = gap()
    for i in range(steps):
        rows = torch.arange(32) + 17 * i
        posterior.step(lambda net: posterior.likelihood.nll(net(x[rows % 100]), y[rows % 100]))  # noqa: B023


def repeated(count: int, step: Callable[[], Any]) -> None:
    for _ in range(count):
        step()


def test_ivon_with_a_small_fixed_noise_says_that_it_diverges_and_what_helps() -> None:
    with pytest.warns(credo.DivergenceWarning, match=r"Training diverges: .* clip=0\.01 or lr=0\.01") as caught:
        stepped(ivon(), 80)
    assert len(caught) == 1  # once
    stepped(ivon(clip=0.01), 80)  # as advised; a warning would be an error


def test_ivon_does_not_diverge_with_its_defaults() -> None:
    x, y = gap()
    posterior = credo.IVON(network(), data_size=100, likelihood=credo.GaussianNoise(0.1))
    credo.fit(posterior, [(x, y)], epochs=200, progress=False)  # a warning would be an error
    assert credo.predict(posterior, x).mean.abs().max() < 3 * y.abs().max()


def test_it_is_said_in_fit_and_in_torch_optimisers() -> None:
    x, y = gap()
    with pytest.warns(credo.DivergenceWarning):
        credo.fit(ivon(), [(x, y)], epochs=40, schedule="constant", progress=False)
    optimizer = credo.optim.IVON(network(), data_size=100, lr=0.1, clip=None)
    likelihood = credo.GaussianNoise(0.1)
    with pytest.warns(credo.DivergenceWarning):
        repeated(40, lambda: optimizer.step(lambda: likelihood.nll(optimizer.posterior.model(x), y)))


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("map", "optimizer={'clip_norm': 1} or lr=0.0003"),
        ("vogn", "damping=1 or lr=0.001"),
        ("noisy-kfac", "clip=0.0003 or damping=0.1"),
    ],
)
def test_every_method_is_watched(method: str, advice: str) -> None:
    posterior = credo.METHODS[method](network(1, 3), data_size=100)
    x, y = torch.randn(8, 1), torch.arange(8) % 3
    factor = 1.0

    def nll(net: nn.Module) -> Tensor:
        return factor + F.cross_entropy(net(x), y)

    posterior.step(nll)
    factor = 100.0
    with pytest.warns(credo.DivergenceWarning, match=advice.replace(".", r"\.")):
        repeated(STEPS_ABOVE + 5, lambda: posterior.step(nll))


def test_only_a_row_of_steps_far_above_the_start_counts() -> None:
    posterior = credo.MAP(network(), data_size=10)
    watch, limit = TrainingWatch(), 2.0 + 2 * ABOVE_START
    watch.after_step(math.nan, posterior)  # a loop that does not say
    for nll in [2.0, *[limit] * 50, *[limit + 1] * (STEPS_ABOVE - 1), limit, *[limit + 1] * (STEPS_ABOVE - 1)]:
        watch.after_step(nll, posterior)
    with pytest.warns(credo.DivergenceWarning, match="above 22 .now 23"):
        watch.after_step(limit + 1, posterior)
    watch.after_step(limit + 1, posterior)


def test_a_resumed_training_knows_where_it_began(tmp_path: Path) -> None:
    x, y = gap()
    path = tmp_path / "run.pt"
    credo.fit(ivon(), [(x, y)], epochs=STEPS_ABOVE - 2, checkpoint=path, schedule="constant", progress=False)
    with pytest.warns(credo.DivergenceWarning, match=r"steps in a row .* and 2\d(\.\d)? at the first step"):
        credo.fit(ivon(), [(x, y)], epochs=STEPS_ABOVE + 3, checkpoint=path, schedule="constant", progress=False)


# -- the first draw ------------------------------------------------------------------------------------------


def good_classifier() -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose mean knows the answers, and its data."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 10, generator=generator), torch.randint(3, (64,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))
    fitted = credo.MAP(model, data_size=64, lr=1e-2)
    for _ in range(60):
        fitted.step(lambda net: F.cross_entropy(net(x), y))
    return model, x, y


BAD_STARTS = [
    ("bbb", {"init": 3.0}, "init=0.3 or a smaller init.relative_std"),
    ("ivon", {"curvature": {"init": 0.01}, "prior_precision": 0.1}, "curvature={'init': 1} or temperature=0.01"),
    ("vogn", {"curvature": {"init": 0.0}, "damping": 1e-3, "prior_precision": 0.01}, "temperature=0.01"),
    ("node-bnn", {"init": {"spread": 8.0}}, "a smaller init.std"),
]


@pytest.mark.parametrize(("method", "options", "advice"), BAD_STARTS)
def test_a_first_draw_that_ruins_a_good_network_is_said(method: str, options: dict[str, Any], advice: str) -> None:
    model, x, y = good_classifier()
    posterior = credo.METHODS[method](model, data_size=64, **options)
    with pytest.warns(credo.DivergenceWarning, match=f"first draw is far worse than the mean.*{advice}") as caught:
        repeated(3, lambda: posterior.step(lambda net: F.cross_entropy(net(x), y)))
    assert len(caught) == 1
    plain = credo.METHODS[method](good_classifier()[0], data_size=64)
    plain.step(lambda net: F.cross_entropy(net(x), y))


@pytest.mark.parametrize(("method", "options"), [(name, options) for name, options, _ in BAD_STARTS])
def test_looking_changes_nothing_of_the_training(method: str, options: dict[str, Any]) -> None:
    """Also where the loss reads torch's global generator, and where running statistics are counted."""

    def trained(look: bool) -> tuple[dict[str, Any], int]:
        model, x, y = good_classifier()
        posterior = credo.METHODS[method](model, data_size=64, **options)
        posterior._watch.compared = not look
        calls = 0

        def nll(net: nn.Module) -> Tensor:
            nonlocal calls
            calls += 1
            return F.cross_entropy(net(F.dropout(x, 0.1)), y)

        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", credo.DivergenceWarning)
            for _ in range(3):
                posterior.step(nll)
        return posterior.state_dict(), calls

    (ours, looked), (plain, calls) = trained(True), trained(False)
    assert looked == calls + 1
    for name, value in plain.items():
        if isinstance(value, Tensor):
            assert torch.equal(ours[name], value), name


def test_inputs_that_a_network_writes_into_are_written_once() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x -= 1
            outputs: Tensor = self.layer(x) * 100
            return outputs

    torch.manual_seed(0)
    x, y = torch.ones(8, 3), torch.arange(8) % 2
    credo.IVON(Shifting(), data_size=8).step(lambda net: F.cross_entropy(net(x), y))
    assert torch.equal(x, torch.zeros(8, 3))


def test_a_loss_that_fails_without_gradients_still_trains() -> None:
    model, x, y = good_classifier()

    def nll(net: nn.Module) -> Tensor:
        inputs = x.clone().requires_grad_()
        loss = F.cross_entropy(net(inputs), y)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    terms = credo.BBB(model, data_size=64, init=3.0).step(nll)
    assert terms.nll > 5
