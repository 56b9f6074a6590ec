"""Node-based BNNs in use: what comes after training, odd networks, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.attacks import pgd, posterior_logits
from credo.core.errors import UnsupportedModelError
from credo.methods import MAP, NodeBNN
from credo.methods.node.noise import ExampleNoise
from credo.models import build_model


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_all_that_comes_after_training_works(tmp_path) -> None:
    torch.manual_seed(0)
    model = build_model("convnet", inputs=(1, 8, 8), classes=10, channels=[4], hidden=[8], batch_norm=True, seed=0)
    posterior = NodeBNN(model, data_size=60, components=3, nodes={"side": "both", "bias_scale": True}, lr=1e-2)
    x, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 10
    credo.fit(posterior, [(x, y)], epochs=3, progress=False)
    path = credo.save(posterior, tmp_path / "node.safetensors")
    loaded = credo.load(path)
    assert isinstance(loaded, NodeBNN)
    assert torch.equal(credo.predict(loaded, x, draws=6).probs, credo.predict(posterior, x, draws=6).probs)
    logits = posterior_logits(loaded, draws=4)
    assert logits(x[:5]).shape == (6, 5, 10)
    found = pgd(logits, x, y, epsilon=0.1, steps=5)
    shifted = (x + 0.1 * torch.randn_like(x).sign()).clamp(0, 1)
    nlls = [F.nll_loss(credo.predict(loaded, inputs, draws=30).probs.log(), y) for inputs in (x, shifted, found.inputs)]
    assert nlls[2] > max(nlls[:2]) + 0.02
    assert (found.inputs - x).abs().max() <= 0.1 + 1e-6
    plain = MAP(posterior.fold(), data_size=60)
    assert credo.load(credo.save(plain, tmp_path / "plain.safetensors")).model.credo_spec == model.credo_spec
    exported = torch.export.export(posterior.fold(1), (x[:5],)).module()
    torch.testing.assert_close(exported(x[:5]), posterior.fold(1)(x[:5]))
    study = credo.sample_study(posterior, [(x, y)], draws=6)
    assert len(study.accuracies) == 6


def test_a_layer_that_is_called_twice_has_the_same_nodes_both_times() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    model = Twice()
    posterior = NodeBNN(model, data_size=10, nodes={"side": "both", "bias_scale": True})
    x, values = torch.randn(6, 4), 1 + 0.3 * torch.randn(6, 9)
    z, s, v = values.split([4, 4, 1], dim=1)

    def layer(h: torch.Tensor) -> torch.Tensor:
        return (F.linear(h * z, model.layer.weight) + v * model.layer.bias) * s

    with ExampleNoise(model, posterior.nodes, lambda rows: values).on():
        torch.testing.assert_close(model(x), layer(torch.tanh(layer(x))))
    assert math.isfinite(posterior.step(lambda net: net(x).square().mean()).loss)


def test_names_that_look_like_globs_mean_themselves(tmp_path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.ModuleDict({"conv[3x3]": nn.Linear(4, 3), "conv3": nn.Linear(4, 3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.by["conv[3x3]"](x) + self.by["conv3"](x)

    posterior = NodeBNN(Branches(), data_size=10, nodes={"layers": ["by.conv[[]3x3]"]})
    assert list(posterior.nodes) == ["by.conv[3x3]"]
    loaded = credo.load(credo.save(posterior, tmp_path / "node.safetensors"), model=Branches())
    assert list(loaded.nodes) == ["by.conv[3x3]"]
    assert torch.equal(loaded.loc, posterior.loc)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nodes_of_networks_in_half_precision_are_in_single(dtype: torch.dtype, tmp_path) -> None:
    """In bfloat16 steps of 0.001 at 1 are rounded away; in float16 the square of a deviation of 1e-4 is 0."""
    torch.manual_seed(0)
    posterior = NodeBNN(
        mlp().to(dtype), data_size=10, init={"spread": 0.01, "std": 1e-4}, nodes={"side": "both", "bias_scale": True}
    )
    assert posterior.loc.dtype is posterior.rho.dtype is torch.float32
    before = posterior.node_mean()
    x, y = torch.randn(6, 4, dtype=dtype), torch.arange(6) % 3
    terms = [posterior.step(lambda net: F.cross_entropy(net(x).float(), y)) for _ in range(3)]
    assert all(math.isfinite(t.loss) for t in terms)
    assert ((posterior.node_mean() - before).abs() > 1e-4).float().mean() > 0.9
    assert {w.dtype for w in posterior.draw().values()} == {dtype}
    assert {p.dtype for p in posterior.fold().parameters()} == {dtype}
    loaded = credo.load(credo.save(posterior, tmp_path / "node.safetensors"), model=mlp())
    assert torch.equal(loaded.loc, posterior.loc)
    assert {p.dtype for p in loaded.model.parameters()} == {dtype}


def test_one_example_without_a_batch_needs_noise_of_the_batch() -> None:
    x = torch.randn(4)
    with pytest.raises(ValueError, match='noise="batch", one draw'):
        NodeBNN(mlp(), data_size=10).step(lambda net: net(x).square().sum())
    assert math.isfinite(NodeBNN(mlp(), data_size=10, noise="batch").step(lambda net: net(x).square().sum()).loss)


_NESTEROV = {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "left"}, "Unknown nodes.side 'left'"),
        ({"kl_term": "mena"}, "mean 'mean'"),
        ({"noise": "exmaple"}, "mean 'example'"),
        ({"components": 0}, "components=0 must be a whole number"),
        ({"draws": 1.5}, "draws=1.5 must be a whole number"),
        ({"prior": 0.0}, "prior=0.0 must be finite and positive"),
        ({"prior": "0.3"}, "prior='0.3' must be a number"),
        ({"lr": {"nodes.*": float("inf"), "*": 1e-3}}, r"lr=\{.*inf.*\} must be"),
        ({"optimizer": {"nodes": {"lr": 7.0}}}, "given by lr="),
        ({"optimizer": torch.optim.Adam, "lr": {"nodes.*": 0.1, "*": 1e-3}}, "optimisers by name"),
        ({"nodes": {"layers": []}}, "names no layer"),
        ({"init": -0.1}, "init.std=-0.1"),
        ({"init": {"spread": -1.0}}, "spread=-1.0 must be finite and not negative"),
        ({"kl_term": {"gamma": float("nan")}}, "gamma=nan"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"kl_term": {"gamma": 1.0, "estimator": "full"}}, "estimator='full' does not have"),
        ({"nodes": {"layers": ["3.*"]}}, "layer or glob in nodes.layers"),
        ({"lr": {"nodes.*": -1.0, "*": 1e-3}}, r"lr=\{.*-1.0.*\} must be a non-negative number"),
        ({"lr": {"nodes.*": "0.1", "*": 1e-3}}, r"lr=\{.*'0.1'.*\} must be a non-negative number"),
        ({"lr": -1.0}, r"\blr=-1.0 must be a non-negative number"),
        ({"nodes": {"layers": None}}, "nodes.layers=None must be 'all', or globs"),
        ({"nodes": {"layers": [3]}}, r"nodes.layers=\[3\] must be 'all', or globs of layer paths such as '0'"),
        ({"kl_term": {"warmup_steps": 5}}, "warmup_steps=5 has no effect with kl_term.weight='constant'"),
        ({"optimizer": {"name": "sgd", "nodes": {"momentum": -2.0}}}, "optimizer.nodes=.*Invalid momentum value: -2.0"),
        ({"optimizer": {"name": "sgd", "nodes": {"momentum": "a"}}}, "optimizer.nodes="),
        (
            {"optimizer": {"name": "sgd", "options": _NESTEROV, "nodes": {"momentum": 0.0}}},
            "optimizer.nodes=.*Nesterov",
        ),
        ({"optimizer": {"nodes": {"momentum": 0.0}}}, "adam has no option momentum"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodeBNN(mlp(), data_size=10, **options)


def test_a_network_without_such_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer for node variables"):
        NodeBNN(nn.LSTM(3, 4), data_size=10)
