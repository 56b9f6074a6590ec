"""The same Gaussian as laplace-torch's, of the same last layer; skipped where that is not installed.

It is one of `benchmarks/peers.txt`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo

peer = pytest.importorskip("laplace")

# torch.jit.script, in what it imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PRECISION, EXAMPLES = 0.7, 40


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, 5, generator=generator), torch.randint(0, 3, (EXAMPLES,), generator=generator)


def both(structure: str, *, bias: bool, outputs: int = 3) -> tuple[credo.Laplace, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs, bias=bias)).eval()
    x, y = data()
    options: dict[str, Any] = {"prior_precision": PRECISION}
    kind = "classification"
    if outputs == 1:
        y, kind = x[:, :1] + 0.1 * y.unsqueeze(1), "regression"
    likelihood = credo.GaussianNoise(1.0, learn=False) if outputs == 1 else None
    own = credo.Laplace(net, data_size=EXAMPLES, structure=structure, likelihood=likelihood, **options).fit([(x, y)])
    other = peer.Laplace(net, kind, subset_of_weights="last_layer", hessian_structure=structure, **options)
    other.fit(DataLoader(TensorDataset(x, y), batch_size=EXAMPLES))
    return own, other


@pytest.mark.parametrize("outputs", [3, 1])
@pytest.mark.parametrize(("structure", "bias"), [("kron", False), ("full", True), ("diag", True)])
def test_moments_evidence_and_probabilities_are_equal(structure: str, bias: bool, outputs: int) -> None:
    own, other = both(structure, bias=bias, outputs=outputs)
    x = torch.randn(7, 5)
    mean, covariance = own.function_moments(x)
    wanted_mean, wanted = other._glm_predictive_distribution(x)
    torch.testing.assert_close(mean, wanted_mean.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(covariance, wanted.detach(), rtol=1e-4, atol=1e-4)
    assert own.log_marginal_likelihood() == pytest.approx(float(other.log_marginal_likelihood()), rel=1e-4)
    if outputs > 1:
        probs = other(x, pred_type="glm", link_approx="probit").detach()
        torch.testing.assert_close(credo.predict(own, x, link="probit").probs, probs, rtol=1e-4, atol=1e-4)


def test_its_kronecker_factors_leave_out_that_weights_and_biases_depend_on_each_other() -> None:
    """Ours have the bias as one more input, so their evidence is closer to that of the whole matrix."""
    (own, other), (whole, _) = both("kron", bias=True), both("full", bias=True)
    exact = whole.log_marginal_likelihood()
    assert abs(own.log_marginal_likelihood() - exact) < 0.2 * abs(float(other.log_marginal_likelihood()) - exact)
