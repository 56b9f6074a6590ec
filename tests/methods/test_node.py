"""Node-based BNNs: noise for each example and folded weights are the same thing, and a step is what it says."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import credo
from credo.core.errors import UnsupportedModelError
from credo.methods import NodeBNN
from credo.methods.node.elbo_terms import entropy_bound
from credo.methods.node.layers import folded, node_layers
from credo.methods.node.noise import ExampleNoise, by_turns, values_by_turns
from credo.models import build_model


def mlp(seed: int = 0, **options: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, **options), nn.Tanh(), nn.Linear(6, 3, **options))


def convs() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, groups=2, stride=2),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 16, 3, groups=8, padding="same", bias=False),
        nn.Flatten(),
        nn.Linear(16 * 9, 5),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (mlp, (4,)),
    "a layer itself": (lambda: nn.Linear(4, 3), (4,)),
    "linear over time": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (7, 4)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv1d(6, 2, 2)), (4, 9)),
    "conv2d": (convs, (3, 8, 8)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Conv3d(4, 3, 2, groups=1)), (2, 4, 4, 4)),
}
SIDES = [("in", False), ("in", True), ("out", False), ("out", True), ("both", True)]


# In double precision exactly; in single precision compiled kernels take part.
PRECISIONS = {torch.double: {"rtol": 1e-10, "atol": 1e-12}, torch.float: {"rtol": 1e-4, "atol": 1e-5}}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(("side", "bias_scale"), SIDES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_folded_network_is_the_unfolded_one_at_fixed_nodes(
    name: str, side: str, bias_scale: bool, dtype: torch.dtype
) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    nodes = node_layers(model, credo.Nodes(side=side, bias_scale=bias_scale))
    values = 1 + 0.5 * torch.randn(max(node.span.stop for node in nodes.values()), dtype=dtype)
    x = torch.randn(6, *shape, dtype=dtype)
    with ExampleNoise(model, nodes, lambda rows: values.expand(rows, -1)).on():
        noisy = model(x)
    weights = folded(model, nodes, values)
    torch.testing.assert_close(noisy, torch.func.functional_call(model, weights, (x,)), **PRECISIONS[dtype])
    assert not torch.allclose(noisy, model(x))


@pytest.mark.part(2)
@pytest.mark.parametrize("side", ["in", "out", "both"])
@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_noise_for_each_example_and_weight_draws_agree_in_distribution(network: str, side: str) -> None:
    """Two samples of 3,000 outputs each, Kolmogorov-Smirnov; a false alarm once in 10,000 for another seed."""
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    posterior = NodeBNN(
        make(), data_size=10, components=3, nodes={"side": side, "bias_scale": True}, init={"spread": 0.5, "std": 0.3}
    )
    posterior.model.eval()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    count = 3000
    with torch.no_grad(), posterior.seeded(2):
        noise = ExampleNoise(posterior.model, posterior.nodes, partial(values_of, posterior))
        with noise.on():
            each = posterior.model(x.expand(count, *shape))
        draws = []
        for draw in posterior.iter_draws(count):
            with posterior.sampled_in_place(draw) as net:  # faster than a private copy for each
                draws.append(net(x[None])[0])
    together = torch.stack(draws)
    for output in range(3):
        assert stats.ks_2samp(each[:, output], together[:, output]).pvalue > 1e-4 / 3
        # The test can tell: a third more spread is noticed.
        mean = each[:, output].mean()
        assert stats.ks_2samp(mean + 1.3 * (each[:, output] - mean), together[:, output]).pvalue < 1e-4


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_gradients_of_a_step_are_those_of_a_loop_over_examples(network: str, dtype: torch.dtype) -> None:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(dtype)
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):  # one row alone has no statistics
            layer.momentum, layer.training = 0.0, False
    posterior = NodeBNN(
        model, data_size=20, components=3, draws=2, nodes={"side": "both", "bias_scale": True}, temperature=0.0
    )
    x, y = torch.randn(5, *shape, dtype=dtype), torch.arange(5) % 3
    twin = copy.deepcopy(posterior)
    grads = {}
    with posterior.prepared(lambda net: F.cross_entropy(net(x), y)):
        grads = {name: p.grad.clone() for name, p in posterior.named_parameters()}
    first = twin._random_component()
    total = torch.zeros((), dtype=dtype)
    for index in range(2):
        eps = twin._normal(5, twin.loc.shape[1])
        for row in range(5):
            component = (first + row + index) % 3
            values = twin.loc[component] + F.softplus(twin.rho[component]) * eps[row]
            out = torch.func.functional_call(twin.model, folded(twin.model, twin.nodes, values), (x[row : row + 1],))
            total = total + F.cross_entropy(out, y[row : row + 1]) / 10
    total.backward()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, **PRECISIONS[dtype])


def values_of(posterior: NodeBNN, rows: int, first: int = 0, index: int = 0) -> torch.Tensor:
    return posterior._example_values(rows, std=F.softplus(posterior.rho), first=torch.tensor(first), index=index)


def test_values_by_turns_are_those_of_selected_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std, noise = (torch.rand(n, 5, generator=generator, dtype=torch.double) for n in (3, 3, 7))
    weights = torch.rand(7, 5, generator=generator, dtype=torch.double)
    for start in range(3):
        rows, turns = (torch.arange(7) + start) % 3, by_turns(7, 3, mean.device, mean.dtype)[start]
        leaves = [[t.clone().requires_grad_() for t in (mean, std)] for _ in range(2)]
        values = values_by_turns(*leaves[0], noise, turns), leaves[1][0][rows] + leaves[1][1][rows] * noise
        torch.testing.assert_close(*values)
        gradients = [torch.autograd.grad((weights * v).sum(), ls) for v, ls in zip(values, leaves, strict=True)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("draws", [1, 2, 4])
def test_components_have_equal_shares_of_the_rows_of_every_pass(draws: int) -> None:
    """A pass with one component alone would be normalised by that component's own statistics."""
    posterior = NodeBNN(mlp(), data_size=10, components=4, init={"std": 1e-6, "spread": 1.0}, draws=draws)
    passes = []
    for index in range(draws):
        values = values_of(posterior, 8, first=3, index=index)
        passes.append(torch.cdist(values, posterior.loc).argmin(1))
        assert passes[-1].bincount(minlength=4).tolist() == [2] * 4
    for row in torch.stack(passes, 1):
        assert len(set(row.tolist())) == draws, "an example sees as many components as it has draws"


def test_conjugate_regression_is_recovered() -> None:
    """Frozen weights and orthogonal inputs: the nodes' posterior is an independent Gaussian, known exactly."""
    torch.manual_seed(0)
    n, features, s, noise = 64, 4, 0.5, 0.4
    x = torch.linalg.qr(torch.randn(n, features, dtype=torch.double))[0] * 3
    model = nn.Linear(features, 1, bias=False).double().requires_grad_(False)
    model.weight.copy_(torch.tensor([[0.7, -1.2, 0.5, 2.0]]))
    y = model(x * torch.tensor([1.3, 0.8, 1.0, 0.5])) + noise * torch.randn(n, 1, dtype=torch.double)
    likelihood = credo.GaussianNoise(std=noise)
    posterior = NodeBNN(
        model, data_size=n, components=1, prior=s, init={"spread": 0.0}, draws=4, lr=0.02, likelihood=likelihood
    )
    for step in range(800):
        posterior.lr_scale = 1.0 if step < 500 else 0.05
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    scaled = x * model.weight
    precision = scaled.square().sum(0) / noise**2 + 1 / s**2
    mean = (scaled.T @ y)[:, 0] / noise**2 / precision + 1 / s**2 / precision
    std = precision.rsqrt()
    assert ((posterior.node_mean()[0] - mean).abs() < 0.5 * std).all()
    torch.testing.assert_close(posterior.node_std()[0], std, rtol=0.12, atol=0.0)


def test_resnet56_with_four_components_has_less_than_five_per_cent_more_parameters() -> None:
    posterior = NodeBNN(build_model("resnet56", seed=0), data_size=10, components=4)
    own = sum(p.numel() for p in posterior.parameters()) - sum(p.numel() for p in posterior.model.parameters())
    assert own == 2 * 4 * credo.summary(posterior.model).nodes
    assert own / 853_018 < 0.05


def test_fold_gives_a_plain_network_with_the_means_in_it() -> None:
    posterior = NodeBNN(mlp(), data_size=10, components=3, nodes="both", init=1e-6)
    x = torch.randn(5, 4)
    for component, draw in enumerate(posterior.iter_draws(3)):
        plain = posterior.fold(component)
        assert type(plain) is nn.Sequential
        torch.testing.assert_close(plain(x), torch.func.functional_call(posterior.model, draw, (x,)))
    with torch.no_grad():
        same = NodeBNN(mlp(), data_size=10, components=1, nodes="both")
        same.loc.copy_(posterior.loc.mean(0, keepdim=True))
    torch.testing.assert_close(posterior.fold()(x), same.fold(0)(x))
    assert not {id(p) for p in posterior.fold().parameters()} & {id(p) for p in posterior.parameters()}
    with pytest.raises(ValueError, match="component=3: there are 0 to 2"):
        posterior.fold(3)


def test_predictions_take_every_component_equally_often() -> None:
    posterior = NodeBNN(mlp(), data_size=10, components=3, init={"std": 1e-6, "spread": 1.0})
    x = torch.randn(7, 4)
    prediction = credo.predict(posterior, x, draws=4)
    assert prediction.draws_used.tolist() == [6] * 7
    expected = torch.stack([posterior.fold(k)(x).softmax(1) for k in range(3)]).mean(0)
    torch.testing.assert_close(prediction.probs, expected, rtol=1e-4, atol=1e-5)


def test_two_groups_and_the_rate_of_the_nodes() -> None:
    options: dict[str, Any] = {"data_size": 10, "components": 5, "lr": {"nodes.*": 0.03, "*": 0.1}}
    sgd = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}
    weights, nodes = NodeBNN(mlp(), **options, optimizer={**sgd, "nodes": {"momentum": 0.0}})._optimizer().param_groups
    assert (weights["lr"], weights["weight_decay"], weights["momentum"]) == (0.1, 0.01, 0.9)
    assert (nodes["lr"], nodes["weight_decay"], nodes["momentum"]) == (pytest.approx(0.15), 0.0, 0.0)
    assert len(nodes["params"]) == 2
    weights, nodes = NodeBNN(mlp(), **{**options, "lr": 0.1}, optimizer=sgd)._optimizer().param_groups
    assert (weights["lr"], nodes["lr"]) == (0.1, pytest.approx(0.5))
    weights, nodes = NodeBNN(mlp(), **options)._optimizer().param_groups
    assert (weights["lr"], nodes["lr"]) == (0.1, 0.03), "Adam's steps do not depend on the gradient's scale"
    frozen = NodeBNN(mlp().requires_grad_(False), **options)
    assert len(frozen._optimizer().param_groups) == 1
    with pytest.raises(ValueError, match="adam has no option momentun"):
        NodeBNN(mlp(), **options, optimizer={"nodes": {"momentun": 0.5}})


def test_frozen_weights_stay_and_their_nodes_are_trained() -> None:
    model = mlp().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    posterior = NodeBNN(model, data_size=10, lr=0.05)
    start = posterior.node_mean()
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    terms = [posterior.step(lambda net: F.cross_entropy(net(x), y)) for _ in range(3)]
    assert all(math.isfinite(t.loss) for t in terms)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(posterior.node_mean(), start)


def test_terms_are_the_kl_with_its_weight_and_gamma() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    posterior = NodeBNN(
        mlp(), data_size=50, kl_term={"gamma": 2.0, "weight": "warmup", "warmup_steps": 4}, temperature=0.5
    )
    kl = posterior.kl().item()
    first = posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert (first.penalty, first.kl) == (0.0, pytest.approx(kl, rel=1e-5))
    entropy = entropy_bound(posterior.loc, F.softplus(posterior.rho)).item()
    expected = 0.5 * 0.25 / 50 * (posterior.kl().item() - 2 * entropy)
    second = posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert second.penalty == pytest.approx(expected, rel=1e-5)
    assert second.loss == pytest.approx(second.nll + second.penalty)


class Flattened(nn.Module):
    """Time and batch in one dimension for its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden.flatten(0, 1)).view(*hidden.shape[:2], 3).mean(1)


class Direct(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).relu(), self.second.weight, self.second.bias)


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [(Flattened, (6, 7, 4), "second got 42 rows where the first layer had 6"), (Direct, (6, 4), "weights of second")],
)
def test_networks_where_noise_for_each_example_cannot_act_are_refused(
    network: type[nn.Module], shape: tuple[int, ...], message: str
) -> None:
    x, y = torch.randn(shape), torch.arange(6) % 3
    posterior = NodeBNN(network(), data_size=10)
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=message):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert all(torch.equal(p, before[name]) for name, p in posterior.named_parameters())
    batch = NodeBNN(network(), data_size=10, noise="batch")
    assert math.isfinite(batch.step(lambda net: F.cross_entropy(net(x), y)).loss)
    rest = NodeBNN(network(), data_size=10, nodes={"layers": ["first"]})
    assert math.isfinite(rest.step(lambda net: F.cross_entropy(net(x), y)).loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_do_not_change_a_step(reentrant: bool) -> None:
    class Part(nn.Sequential):
        again = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant) if self.again else super().forward(x)

    x, y = torch.randn(6, 4), torch.arange(6) % 3
    states = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), Part(nn.ReLU(), nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 3))
        model[1].again = again
        posterior = NodeBNN(model, data_size=10, nodes="both", lr=0.05)
        for _ in range(2):
            posterior.step(lambda net: F.cross_entropy(net(x), y))
        states.append({name: p.detach().clone() for name, p in posterior.named_parameters()})
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, msg=name)
    model[1].again = True
    with pytest.raises(UnsupportedModelError, match="checkpoint runs a part again"):
        posterior.step(lambda net: F.cross_entropy(torch.cat([net(x[:3]), net(x[3:])]), y))


def test_only_the_first_pass_counts_for_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    posterior = NodeBNN(model, data_size=10, draws=3)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert model[1].num_batches_tracked == 1
