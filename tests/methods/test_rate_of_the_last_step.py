"""The momentum is corrected by the rate at which it was made, also after loading into a method with another `lr`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo import optim

KINDS: dict[str, dict[str, Any]] = {
    "VOGN": {"curvature": {"init": 0.5}},
    "OGN": {},
    "NoisyKFAC": {"clip": None},
    "KFAC": {"clip": None},
    "IVON": {},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


def nll(net: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return F.cross_entropy(net(x), torch.randint(3, (12,), generator=generator))


def trained(kind: str, lr: Any, steps: int) -> Any:
    optimizer = getattr(optim, kind)(network(), data_size=40, lr=lr, **KINDS[kind])
    for _ in range(steps):
        optimizer.step(lambda: nll(optimizer.posterior.model))
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lr", [0.005, 0.03])
def test_an_optimiser_goes_on_at_the_saved_rate_whatever_lr_it_was_made_with(kind: str, lr: float) -> None:
    first, other = trained(kind, 0.01, 3), trained(kind, lr, 0)
    other.posterior.model.load_state_dict(first.posterior.model.state_dict())
    other.load_state_dict(first.state_dict())
    assert other.param_groups[0]["lr"] == 0.01
    for rate in (0.01, 0.004):
        for optimizer in (first, other):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step(lambda optimizer=optimizer: nll(optimizer.posterior.model))
        for wanted, found in zip(first.posterior.model.parameters(), other.posterior.model.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


RATES = [(0.1, 0.04), (0.1, {"0.*": 0.1, "*": 0.02}), ({"3.*": 0.2, "*": 0.1}, {"0.*": 0.3, "*": 0.02})]


def rate_of(name: str, lr: Any) -> float:
    return float(lr if not isinstance(lr, dict) else lr.get(f"{name[0]}.*", lr["*"]))


@pytest.mark.parametrize("kind", ["VOGN", "OGN", "KFAC", "NoisyKFAC"])
@pytest.mark.parametrize(("saved", "lr"), RATES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_each_momentum_is_rescaled_by_its_own_rates(kind: str, saved: Any, lr: Any, scale: float) -> None:
    """m ← β·(rate now / rate then)·m + g, against the same step without a momentum, m ← g."""
    made = getattr(credo, kind)
    start = made(network(), data_size=40, lr=saved, **KINDS[kind])
    for start.lr_scale in (1.0, 0.5):
        start.step(nll)
    state = copy.deepcopy(start.state_dict())
    momenta = []
    for momentum in (0.9, 0.0):
        posterior = made(network(), data_size=40, lr=lr, momentum=momentum, **KINDS[kind])
        posterior.load_state_dict(copy.deepcopy(state))
        posterior.lr_scale = scale
        posterior.step(nll)
        momenta.append(momentum_of(posterior))
    for name, before in momentum_of(start).items():
        change = rate_of(name, lr) * scale / (rate_of(name, saved) * 0.5)
        torch.testing.assert_close(momenta[0][name], momenta[1][name] + 0.9 * change * before)


def momentum_of(posterior: Any) -> dict[str, Tensor]:
    if hasattr(posterior, "momentum"):
        return {name: m.clone() for name, m in posterior.vector.layout.split(posterior.momentum).items()}
    return {name: m.clone() for block in posterior.blocks for name, m in block.split(block.momentum).items()}


def test_a_state_without_its_rate_is_one_of_the_same_rate() -> None:
    """As states were before they said it."""
    start = credo.VOGN(network(), data_size=40, lr=0.1)
    start.lr_scale = 0.5
    start.step(nll)
    state = start.state_dict()
    del state["_extra_state"]["lr"]
    other = credo.VOGN(network(), data_size=40, lr=0.1)
    other.load_state_dict(state)
    for posterior in (start, other):
        posterior.lr_scale = 0.2
        posterior.step(nll)
    assert torch.equal(start.momentum, other.momentum)


@pytest.mark.parametrize(("saved", "lr"), [(0.1, {"*": 0.1}), ({"*": 0.1}, 0.1)], ids=str)
def test_a_rate_is_not_taken_for_a_factor_of_rates_by_name(saved: Any, lr: Any) -> None:
    state = trained("VOGN", saved, 1).state_dict()
    with pytest.raises(ValueError, match=r"saved with (one number|rates by name) as lr.*has (one|rates)"):
        trained("VOGN", lr, 0).load_state_dict(state)
