"""Node-based BNNs as mixtures: in ensembles, folded, over passes in which layers rest, and by the kinds of their KL."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import credo
from credo.core.errors import UnsupportedModelError
from credo.data import load_dataset
from credo.experiments.corruption_study import shift_study
from credo.methods import Ensemble, NodeBNN
from credo.methods.node.elbo_terms import add_bound_gradients_, bound_terms, mean_terms
from credo.models import build_model


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_an_ensemble_takes_all_components_of_all_members() -> None:
    """With hardly any noise the mixture is known: the mean over members and components of what folded networks say."""
    members = [
        NodeBNN(mlp(), data_size=10, components=count, init={"std": 1e-6, "spread": 1.0}, seed=count)
        for count in (2, 3)
    ]
    ensemble, x = Ensemble(members), torch.randn(5, 4)
    assert [ensemble.whole_draws(wanted) for wanted in (1, 12, 13)] == [12, 12, 24]
    each = [torch.stack([part.fold(c)(x).softmax(-1) for c in range(part.components)]).mean(0) for part in members]
    found = credo.predict(ensemble, x, draws=5)
    torch.testing.assert_close(found.probs, torch.stack(each).mean(0), rtol=0, atol=1e-4)


def test_a_folded_network_is_deterministic_after_training() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    posterior, x = NodeBNN(net, data_size=12), torch.randn(12, 3)
    credo.fit(posterior, [(x, torch.randint(2, (12,)))], epochs=2)
    assert posterior.model.training
    plain = posterior.fold()
    assert torch.equal(plain(x), plain(x))
    torch.testing.assert_close(plain(x), torch.cat([plain(row) for row in x.split(1)]))


class Sometimes(nn.Module):
    """A layer that is called in every other pass; or one whose weights are used without a call."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self.first, self.second, self.direct, self.calls = nn.Linear(3, 3), nn.Linear(3, 3), direct, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.direct:
            return F.linear(x, self.second.weight)
        return self.second(x) if self.calls % 2 else x


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_may_rest_in_some_passes_but_not_be_used_uncalled(frozen: bool) -> None:
    x, y = torch.randn(6, 3), torch.randint(3, (6,))
    resting = NodeBNN(Sometimes(direct=False).requires_grad_(not frozen), data_size=10, draws=2)
    for _ in range(3):
        resting.step(lambda net: F.cross_entropy(net(x), y))
    direct = NodeBNN(Sometimes(direct=True).requires_grad_(not frozen), data_size=10)
    with pytest.raises(UnsupportedModelError, match="second are used without a call"):
        direct.step(lambda net: F.cross_entropy(net(x), y))


def test_the_bound_by_layers_is_the_sum_of_theirs() -> None:
    posterior = NodeBNN(mlp(), data_size=10, components=3, kl_term="layer-bound", init={"spread": 0.5})
    loc, std = posterior.node_mean(), posterior.node_std()
    spans = [node.span for node in posterior.nodes.values()]
    assert [span.stop - span.start for span in spans] == [4, 6]
    parts = [bound_terms(loc[:, span], std[:, span], 0.3, 0.0, [slice(None)])[1] for span in spans]
    torch.testing.assert_close(posterior.kl().detach(), parts[0] + parts[1])
    joint = NodeBNN(mlp(), data_size=10, components=3, kl_term="bound", init={"spread": 0.5})
    torch.testing.assert_close(joint.kl().detach(), bound_terms(loc, std, 0.3, 0.0, [slice(None)])[1])
    assert joint.kl() > posterior.kl() + 0.1


def test_the_full_kl_is_that_of_every_component() -> None:
    posterior = NodeBNN(mlp(), data_size=10, components=3, kl_term="full", init={"spread": 0.5})
    q = Normal(posterior.node_mean(), posterior.node_std())
    torch.testing.assert_close(posterior.kl().detach(), kl_divergence(q, Normal(1.0, 0.3)).sum())


def test_the_kl_of_the_average_wants_deviations_that_grow_with_the_components() -> None:
    """Of K draws the average has a K-th of the variance: it meets the prior where each component has √K of its std."""
    grid = torch.linspace(0.05, 3.0, 5901).double()
    for components in (1, 4, 32):
        mean = torch.ones(components, 1).double()
        kls = [float(mean_terms(mean, std.expand(components, 1), 0.3, 0.0, [slice(None)])[1]) for std in grid]
        best = min(range(len(kls)), key=kls.__getitem__)
        assert float(grid[best]) == pytest.approx(0.3 * components**0.5, abs=1e-3)
        assert kls[best] == pytest.approx(0.0, abs=1e-5)


def test_a_study_of_shift_says_how_many_networks_were_drawn() -> None:
    digits = load_dataset("digits")
    posterior = NodeBNN(build_model("mlp", inputs=(1, 8, 8), classes=10, hidden=[8], seed=0), data_size=9, components=4)
    found = shift_study(posterior, digits.test, kinds=("contrast",), severities=(1,), examples=20, draws=2)
    assert found["draws"] == 4


@pytest.mark.parametrize("weight", [1.5, 0.0])
@pytest.mark.parametrize("components", [1, 2, 4])
def test_the_gradients_of_the_bound_are_autograds(components: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(components, 30, generator=generator, dtype=torch.double).requires_grad_()
    std = torch.rand(components, 30, generator=generator, dtype=torch.double).add(0.05).requires_grad_()
    minimised, kl = bound_terms(mean, std, 0.3, 0.7, [slice(None)])
    expected = torch.autograd.grad(weight * minimised, (mean, std))
    with torch.no_grad():
        found = tuple(torch.ones_like(mean) for _ in range(2))
        values = add_bound_gradients_(mean, std, 0.3, 0.7, weight, *found)
    for ours, autograds in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, 1 + autograds, rtol=1e-10, atol=1e-10)
    assert values() == pytest.approx((minimised.item(), kl.item()), rel=1e-12)
