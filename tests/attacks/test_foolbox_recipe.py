"""The adapter to foolbox on docs/attacks.md: with foolbox if it is installed, and its own part with a stand-in."""

import importlib.util
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import ROOT
from torch import Tensor, nn

from credo.attacks import pgd

needs_foolbox = pytest.mark.skipif(importlib.util.find_spec("foolbox") is None, reason="foolbox is not installed")


def recipe() -> Any:
    page = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import foolbox\n.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(code, names)
    return names["foolbox_attack"]


def case() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    net, x = nn.Linear(6, 2), 0.3 + 0.4 * torch.rand(20, 6)
    return net, x, net(x).argmax(1).detach()


@needs_foolbox
@pytest.mark.filterwarnings("ignore")
def test_the_same_optimum_as_ours() -> None:
    """On two linear classes all attacks in a cube end in the same corner."""
    import foolbox

    net, x, y = case()
    state = torch.get_rng_state()
    inputs, success = recipe()(foolbox.attacks.LinfPGD(rel_stepsize=0.1), net.eval(), x, y, epsilon=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    ours = pgd(net, x, y, epsilon=0.1)
    torch.testing.assert_close(inputs, ours.inputs)
    assert torch.equal(success, ours.success)


@needs_foolbox
@pytest.mark.filterwarnings("ignore")
def test_several_draws() -> None:
    import foolbox

    net, x, y = case()

    def both(x: Tensor) -> Tensor:
        return torch.stack([net(x), 2 * net(x)])

    inputs, success = recipe()(foolbox.attacks.LinfPGD(rel_stepsize=0.1), both, x, y, epsilon=0.1)
    assert torch.equal(success, net(inputs).argmax(1) != y)
    torch.testing.assert_close(inputs, pgd(both, x, y, epsilon=0.1).inputs)


def stand_in() -> Any:
    """The two parts of foolbox that the recipe uses."""

    class PyTorchModel:
        def __init__(self, model: nn.Module, bounds: tuple[float, float], device: Any) -> None:
            assert not model.training, "foolbox warns of a network in training mode"
            self.model, self.bounds = model, bounds

        def __call__(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.model(x)
            return outputs

    return SimpleNamespace(PyTorchModel=PyTorchModel, criteria=SimpleNamespace(Misclassification=lambda y: y))


def one_step(model: Any, x: Tensor, y: Tensor, *, epsilons: float) -> tuple[Tensor, Tensor, Tensor]:
    """As foolbox calls it: raw and clipped inputs, and whether their labels changed; from a random start."""
    leaf = (x + 1e-3 * torch.randn_like(x)).requires_grad_()
    loss = nn.functional.cross_entropy(model(leaf), y, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, leaf)
    raw = x + epsilons * gradient.sign()
    clipped = raw.clamp(*model.bounds)
    return raw, clipped, model(clipped).argmax(1) != y


def test_the_adapter_leaves_modes_and_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foolbox", stand_in())
    net, x, y = case()
    state = torch.get_rng_state()
    inputs, success = recipe()(one_step, net, x, y, epsilon=0.3)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    ours = pgd(net, x, y, epsilon=0.3)
    torch.testing.assert_close(inputs, ours.inputs)
    assert torch.equal(success, ours.success)
    assert int(success.sum()) > 0


def test_the_adapter_averages_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foolbox", stand_in())
    nets = [nn.Linear(6, 3) for _ in range(4)]
    x, y = torch.rand(5, 6), torch.zeros(5, dtype=torch.long)

    def look(model: Any, x: Tensor, y: Tensor, *, epsilons: float) -> tuple[None, Tensor, None]:
        return None, model(x), None

    scores, _ = recipe()(look, lambda x: torch.stack([net(x) for net in nets]), x, y, epsilon=0.1)
    expected = torch.stack([net(x).softmax(-1) for net in nets]).mean(0)
    torch.testing.assert_close(scores.softmax(-1), expected)
