"""K-FAC with the products of wide layers against those of narrow ones: the same steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from credo import NoisyKFAC

NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
    "groups": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
}


@pytest.mark.parametrize("name", NETS)
def test_steps_of_wide_layers_are_those_of_narrow_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 5) if name == "mlp" else torch.randn(9, 4, 3, 3)
    x, y = x.double(), torch.randint(3, (9,))

    def trained() -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(1)
        net = NETS[name]().double()
        posterior = NoisyKFAC(net, data_size=9, curvature={"inverse_every": 2})
        terms = [posterior.step(lambda net: F.cross_entropy(net(x), y)) for _ in range(5)]
        return [term.loss for term in terms], [*posterior.mean().values(), *posterior.std().values()]

    expected = trained()
    for factors in ("_LARGE", "_LARGE_GRAM", "LARGE_INVERSE"):
        monkeypatch.setattr(f"credo.core.kronecker.factors.{factors}", 0)
    monkeypatch.setattr("credo.core.kronecker.factors._LEAST", 2)
    monkeypatch.setattr("credo.methods.kfac.blocks.LARGE_INVERSE", 0)
    found = trained()
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)
