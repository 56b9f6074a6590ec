"""A network with a head for classes and one for values: trained by the sum of both losses, predicted one at a time."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo

RNG = torch.Generator().manual_seed(0)
X = torch.randn(60, 4, generator=RNG)
BATCHES = [{"x": X[i : i + 20], "kind": X[i : i + 20, 0].gt(0).long(), "size": X[i : i + 20, 1:2]} for i in (0, 20, 40)]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"kind": self.kind(h), "size": self.size(h)}


def both(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = net(batch["x"])
    return F.cross_entropy(out["kind"], batch["kind"]) + 50 * F.mse_loss(out["size"], batch["size"])  # noise of 0.1


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.IVON, credo.VOGN, credo.NoisyKFAC, credo.NodeBNN])
def test_both_heads_are_predicted(method: Any) -> None:
    torch.manual_seed(0)
    posterior = credo.fit(method(TwoHeads(), data_size=60), BATCHES, epochs=2, nll=both)
    kinds = credo.predict(
        posterior, BATCHES, draws=4, forward=lambda n, b: n(b["x"])["kind"], target=lambda b: b["kind"]
    )
    assert isinstance(kinds, credo.ClassPrediction)
    assert kinds.probs.shape == (60, 2)
    other = copy.deepcopy(posterior)
    other.likelihood = credo.GaussianNoise(0.1)
    sizes = credo.predict(other, BATCHES, draws=4, forward=lambda n, b: n(b["x"])["size"], target=lambda b: b["size"])
    assert isinstance(sizes, credo.RegressionPrediction)
    assert sizes.mean.shape == (60, 1)
    assert torch.allclose(sizes.aleatoric, torch.tensor(0.1))
    with pytest.raises(TypeError, match=r"got a dict with 'kind', 'size'.*Name the output by forward="):
        credo.predict(posterior, X)
