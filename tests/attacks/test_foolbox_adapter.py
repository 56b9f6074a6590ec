"""The adapter to foolbox: against our own attack where foolbox is there, and what is said where it is not."""

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

from credo.attacks import foolbox_attack, pgd

needs_foolbox = pytest.mark.skipif(importlib.util.find_spec("foolbox") is None, reason="foolbox is not installed")


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
    theirs = foolbox_attack(foolbox.attacks.LinfPGD(rel_stepsize=0.1), net, x, y, epsilon=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    ours = pgd(net, x, y, epsilon=0.1)
    torch.testing.assert_close(theirs.inputs, ours.inputs)
    assert torch.equal(theirs.success, ours.success)
    assert int(theirs.queries[0]) > 40


@needs_foolbox
@pytest.mark.filterwarnings("ignore")
def test_several_draws_and_targets() -> None:
    import foolbox

    net, x, y = case()

    def both(x: Tensor) -> Tensor:
        return torch.stack([net(x), 2 * net(x)])

    found = foolbox_attack(foolbox.attacks.LinfPGD(), both, x, y, epsilon=0.1, targets=1 - y, batch_size=7)
    assert len(found) == 20
    assert torch.equal(found.success, net(found.inputs).argmax(1) == 1 - y)


def test_without_foolbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foolbox", None)
    net, x, y = case()
    with pytest.raises(ImportError, match="pip install foolbox"):
        foolbox_attack(None, net, x, y, epsilon=0.1)
