"""Compact networks say what pruned ones say, and are smaller."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.compress import compact, compact_network, prune
from credo.compress.structure import connections
from credo.models import build_model


def size(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def used(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """A network whose biases and running statistics are not those of a new one, and inputs."""
    net = build_model(name, seed=0, **options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, *options.get("inputs", (1, 28, 28)), generator=generator)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for _ in range(2):
            net.train()(x)
    return net.eval(), x


NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [20, 30]},
    "lenet5": {},
    "convnet": {"inputs": (1, 8, 8), "activation": "softplus", "batch_norm": True},
    "alexnet-half": {"inputs": (3, 32, 32)},
    "resnet20": {"inputs": (3, 16, 16)},
    "vgg16-bn": {"inputs": (3, 32, 32)},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_units_disappear_and_outputs_stay(name: str) -> None:
    net, x = used(name, **NETWORKS[name])
    posterior = credo.MAP(net, data_size=10)
    prune(posterior, rate=0.4, by="magnitude", structure="units")
    smaller = compact_network(net)
    torch.testing.assert_close(smaller(x), net.eval()(x), rtol=1e-5, atol=1e-5)
    assert size(smaller) < 0.85 * size(net)
    assert [n for n, _ in smaller.named_parameters()] == [n for n, _ in net.named_parameters()]
    # Every unit that could go went: nothing is left to remove.
    assert size(compact_network(smaller)) == size(smaller)
    again = compact(posterior).model
    assert size(again) == size(smaller)
    torch.testing.assert_close(again.eval()(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lenet5", "mlp"])
def test_constants_of_dead_units_go_into_the_next_bias(name: str) -> None:
    """Units without incoming weights say act(bias); LeNet's second convolution is not padded, so it can take it."""
    net, x = used(name)
    first, second = ("conv1", "conv2") if name == "lenet5" else ("fc1", "fc2")
    with torch.no_grad():
        layer = net.get_submodule(first)
        layer.weight[1:4] = 0  # type: ignore[index]
        layer.bias[1:4] = torch.tensor([0.5, -0.5, 2.0])  # type: ignore[index]
        net.get_submodule("fc2").weight[5:50] = 0  # type: ignore[index]
    smaller = compact_network(net)
    torch.testing.assert_close(smaller(x), net(x), rtol=1e-5, atol=1e-5)
    assert len(smaller.get_parameter(f"{first}.bias")) == len(net.get_parameter(f"{first}.bias")) - 3
    assert len(smaller.get_parameter("fc2.bias")) == len(net.get_parameter("fc2.bias")) - 45
    assert not torch.equal(smaller.get_parameter(f"{second}.bias")[:5], net.get_parameter(f"{second}.bias")[:5])


def test_a_constant_before_a_padded_convolution_stays() -> None:
    """At the border the convolution reads zeros, not the constant: no bias can say that."""
    net, x = used("resnet20", inputs=(3, 8, 8))
    block = net.get_submodule("layer1.0")
    with torch.no_grad():
        block.conv1.weight[:8] = 0  # type: ignore[index,union-attr]
        block.bn1.bias[:4] = -9.0  # type: ignore[index,union-attr]
        block.bn1.bias[4:8] = 9.0  # type: ignore[index,union-attr]
    smaller = compact_network(net)
    torch.testing.assert_close(smaller(x), net(x), rtol=1e-5, atol=1e-5)
    assert smaller.get_parameter("layer1.0.conv1.weight").shape == (12, 16, 3, 3)
    assert smaller.get_parameter("layer1.0.conv2.weight").shape == (16, 12, 3, 3)


def test_death_spreads_and_one_unit_always_stays() -> None:
    net = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)
    )
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net[4].weight[:, 2:] = 0  # type: ignore[index,operator]
        net[2].weight[:2, 3:] = 0  # type: ignore[index,operator]
    smaller = compact_network(net)
    assert [layer.weight.shape for layer in smaller if isinstance(layer, nn.Linear)] == [(3, 4), (2, 3), (3, 2), (2, 3)]  # type: ignore[union-attr]
    torch.testing.assert_close(smaller(x), net(x), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        net[2].weight.zero_()  # type: ignore[operator,union-attr]
    smaller = compact_network(net)
    assert [layer.weight.shape for layer in smaller if isinstance(layer, nn.Linear)] == [(1, 4), (1, 1), (1, 1), (2, 1)]  # type: ignore[union-attr]
    torch.testing.assert_close(smaller(x), net(x), rtol=1e-5, atol=1e-6)


def test_compact_posteriors_have_the_same_distribution(kit: Any, kind: str) -> None:
    posterior = kit.trained(kit.KINDS[kind])
    masks = prune(posterior, rate=0.5, by=kit.criterion(posterior), structure="units")
    smaller = compact(posterior)
    assert type(smaller) is type(posterior)
    assert size(smaller.model) < size(posterior.model)
    posterior.eval(), smaller.eval()
    torch.testing.assert_close(smaller.model(kit.X), posterior.model(kit.X), rtol=1e-5, atol=1e-5)
    if isinstance(posterior, credo.GaussianPosterior):
        # Weights that stay keep their order.
        moments = zip((posterior.mean(), posterior.std()), (smaller.mean(), smaller.std()), strict=True)
        for old, new in moments:
            assert old.keys() == new.keys()
            for name in old:
                torch.testing.assert_close(new[name].flatten(), old[name][masks[name]], rtol=1e-5, atol=0)
    smaller.train()
    before = [p.detach().clone() for p in smaller.parameters()]
    smaller.step(kit.nll)
    assert not all(torch.equal(a, b) for a, b in zip(before, smaller.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["bbb", "vogn", "ivon"])
def test_folded_constants_of_random_weights(kit: Any, kind: str) -> None:
    """bias + Σ weight·c of independent Gaussians: means add, and variances times c². Softplus gives c = log 2."""
    make = kit.KINDS[kind]
    net = build_model("mlp", inputs=(1, 8, 8), classes=4, hidden=[6, 5], activation="softplus", seed=0)
    posterior = kit.trained(make, net)
    dead = torch.ones(6, 64, dtype=torch.bool)
    dead[2:4] = False
    posterior.keep_({"fc1.weight": dead, "fc1.bias": dead[:, 0]})
    smaller = compact(posterior)
    c = torch.tensor(2.0).log()
    mean, std, new_mean, new_std = posterior.mean(), posterior.std(), smaller.mean(), smaller.std()
    torch.testing.assert_close(
        new_mean["fc2.bias"], mean["fc2.bias"] + c * mean["fc2.weight"][:, 2:4].sum(1), rtol=1e-5, atol=1e-6
    )
    variance = std["fc2.bias"].square() + c.square() * std["fc2.weight"][:, 2:4].square().sum(1)
    torch.testing.assert_close(new_std["fc2.bias"], variance.sqrt(), rtol=1e-4, atol=1e-6)
    alive = [0, 1, 4, 5]
    assert torch.equal(new_mean["fc2.weight"], mean["fc2.weight"][:, alive])
    torch.testing.assert_close(new_std["fc1.weight"], std["fc1.weight"][alive], rtol=1e-5, atol=0)


def test_a_random_constant_cannot_be_folded(kit: Any) -> None:
    """act(bias) of a random bias is no Gaussian: the unit stays."""
    net = build_model("mlp", inputs=(1, 8, 8), classes=4, hidden=[6], seed=0)
    posterior = kit.trained(kit.KINDS["bbb"], net)
    dead = torch.ones(6, 64, dtype=torch.bool)
    dead[2:4] = False
    posterior.keep_({"fc1.weight": dead})
    assert size(compact(posterior).model) == size(net)


@pytest.mark.parametrize("kind", ["map", "bbb by name", "vogn", "ivon"])
def test_compact_posteriors_in_files(kit: Any, kind: str, tmp_path: Path) -> None:
    posterior = kit.trained(kit.KINDS[kind])
    prune(posterior, rate=0.5, by=kit.criterion(posterior), structure="units")
    prune(posterior, rate=0.6, by=kit.criterion(posterior))
    smaller = compact(posterior)
    path = credo.save(smaller, tmp_path / "small.safetensors")
    own = credo.load(path)
    given = credo.load(path, model=kit.network(seed=3))
    for loaded in (own, given):
        theirs = loaded.state_dict()
        for name, tensor in smaller.state_dict().items():
            assert not isinstance(tensor, Tensor) or torch.equal(tensor, theirs[name]), name
    assert compact(own).model.state_dict().keys() == own.model.state_dict().keys()


def test_only_what_one_layer_reads_can_go() -> None:
    resnet = connections(build_model("resnet20", inputs=(3, 8, 8), seed=0))
    assert [link.source for link in resnet] == [f"layer{i}.{j}.conv1" for i in (1, 2, 3) for j in range(3)]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            h = self.b(self.b(h))
            out: Tensor = self.c(h) + h
            return out

    assert connections(Twice()) == []

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else x

    with pytest.raises(credo.UnsupportedModelError, match="cannot be traced"):
        connections(Branches())
    with pytest.raises(credo.UnsupportedModelError, match="no removable units"):
        prune(credo.BBB(Twice(), data_size=3), structure="units")


def test_units_are_pruned_at_their_rate_and_by_their_score(kit: Any) -> None:
    posterior = kit.trained(kit.KINDS["bbb"])
    copied = copy.deepcopy(posterior)
    masks = prune(posterior, rate=0.5, structure="units", scope="layer")
    mean, std = copied.mean(), copied.std()
    moments = [
        [torch.cat([m["conv1.weight"][u].flatten(), m["conv2.weight"][:, u].flatten()]) for u in range(6)]
        for m in (mean, std)
    ]
    scores = [signal.norm() / noise.norm() for signal, noise in zip(*moments, strict=True)]
    gone = sorted(range(6), key=lambda u: float(scores[u]))[:3]
    assert (~masks["conv1.weight"].flatten(1).any(1)).nonzero().flatten().tolist() == sorted(gone)
    assert not masks["bn1.weight"][gone].any()
    assert not masks["conv2.weight"][:, gone].any()
    assert not posterior.model.get_parameter("bn1.bias")[gone].any()
    assert int((~masks["fc1.weight"].any(1)).sum()) == 6


def test_constants_pass_through_layers_whose_other_units_are_gone() -> None:
    """Units of the first layer die, and with them some of the second, while others of the second are gone already."""
    net = build_model("mlp", inputs=(1, 8, 8), classes=4, hidden=[6, 5, 4], activation="softplus", seed=0)
    x = torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    posterior = credo.MAP(net, data_size=10)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in net.named_parameters()}
    masks["fc1.weight"][:3] = False
    masks["fc2.weight"][0, 3:] = False  # reads only what has died
    masks["fc2.weight"][1] = False
    masks["fc2.bias"][1] = False
    masks["fc3.weight"][:, 1] = False
    posterior.keep_(masks)
    smaller = compact(posterior)
    shapes = [tuple(p.shape) for name, p in smaller.model.named_parameters() if name.endswith("weight")]
    assert shapes == [(3, 64), (3, 3), (4, 3), (4, 4)]
    torch.testing.assert_close(smaller.eval().model(x), posterior.eval().model(x), rtol=1e-5, atol=1e-6)
