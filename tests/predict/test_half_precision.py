"""Predictions under autocast: passes in bfloat16, sums in single precision."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo

METHODS: dict[str, Any] = {
    "bbb": (credo.BBB, {"init": 0.1}),
    "vogn": (credo.VOGN, {"curvature": {"init": 0.5}}),
    "noisy-kfac": (credo.NoisyKFAC, {}),
    "mc-dropout": (credo.MCDropout, {"rate": 0.2}),
    "node-bnn": (credo.NodeBNN, {}),
    "map": (credo.MAP, {}),
}
NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
}
DRAWS = 400


class Seen(nn.Module):
    """Passes on what it gets; all copies keep its types."""

    types: ClassVar[set[torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.types.add(x.dtype)
        return x


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", METHODS)
def test_passes_are_in_half_precision_and_their_average_is_not(name: str, network: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
    method, options = METHODS[name]
    seen = Seen()
    posterior = method(nn.Sequential(NETWORKS[network](), seen), data_size=200, lr=0.01, **options)
    for _ in range(10):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    posterior.eval()
    predictor = credo.predictor(posterior, draws=DRAWS, seed=0)
    for predict in (lambda: credo.predict(posterior, x, draws=DRAWS, seed=0), lambda: predictor(x)):
        whole = predict()
        seen.types.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = predict()
        assert seen.types == {torch.bfloat16}
        assert half.probs.dtype == whole.probs.dtype
        torch.testing.assert_close(half.probs.sum(-1), torch.ones(12))
        # bfloat16 has three digits; other draws differ by five Monte-Carlo errors of both at most.
        error = (whole.mc_error.square() + half.mc_error.square()).sqrt().nan_to_num(0.0)
        assert ((half.probs - whole.probs).abs().amax(-1) <= 0.02 + 5 * error).all()
