"""What a pass tells of its curvature, against the definitions example by example; all is undone afterwards."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from credo.core.errors import UnsupportedModelError
from credo.core.kronecker.hooks import CurvaturePlan
from credo.core.kronecker.layer_rules import kronecker_layers
from credo.core.network.substitute import aliases
from credo.core.per_example.api import per_example_squares

Loss = Callable[[nn.Module], Tensor]


def plan_for(model: nn.Module, *, random: Any = None, diagonal: tuple[str, ...] = ()) -> CurvaturePlan:
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    layers = kronecker_layers(model, names, names if random is None else random, aliases(model), diagonal)
    covered = {name for layer in layers for name in layer.names}
    return CurvaturePlan(model, layers, [name for name in names if name not in covered], aliases(model))


def watch(model: nn.Module, loss: Loss, **options: Any) -> dict[str, Tensor]:
    with plan_for(model, **options).hooks() as found:
        loss(model).backward()
        return found.result()


def made(model: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def batch(*shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, shape[:1], generator=generator)


X, Y = batch(5, 4)


def cross_entropy(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


class Recorder:
    """Inputs and outputs of a layer, kept in the graph."""

    def __init__(self, layer: nn.Module) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.handle = layer.register_forward_hook(self)

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        self.inputs.append(inputs[0].detach())
        self.outputs.append(out)
        return out.clone()  # an activation in place must not change what is kept


def by_hand(model: nn.Module, layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A and G of a linear layer, one example after the other; uses and rows of an example are its positions."""
    a, g, positions = [], [], 0
    for one, label in zip(x.split(1), y.split(1), strict=True):
        seen = Recorder(layer)
        loss = F.cross_entropy(model(one), label)
        slopes = torch.autograd.grad(loss, seen.outputs)
        seen.handle.remove()
        rows = torch.cat([i.reshape(-1, i.shape[-1]) for i in seen.inputs])
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        gradients = torch.cat([s.reshape(-1, s.shape[-1]) for s in slopes])
        a.append(rows.T @ rows)
        g.append(gradients.T @ gradients)
        positions = len(rows)
    return torch.stack(a).mean(0), torch.stack(g).mean(0) / positions


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.twice(self.first(x).relu()).tanh()))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.unflatten(1, (2, 2))).tanh().mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
    "a layer used twice": Twice,
    "positions": Positions,
    "the network is a layer": lambda: nn.Linear(4, 3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_factors_of_a_pass_are_the_means_over_single_examples(name: str) -> None:
    model = made(NETWORKS[name]())
    found = watch(model, cross_entropy)
    layers = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(found) == 2 * len(layers)
    for path, layer in layers.items():
        a, g = by_hand(model, layer, X, Y)
        weight = f"{path}.weight" if path else "weight"
        torch.testing.assert_close(found[f"{weight} (inputs)"][0], a)
        torch.testing.assert_close(found[f"{weight} (outputs)"][0], g)


def test_a_convolution_sums_inputs_over_positions_and_averages_output_gradients() -> None:
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    model = made(nn.Sequential(conv, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)))
    x, y = batch(5, 2, 4, 4)
    found = watch(model, lambda net: F.cross_entropy(net(x), y))
    a, g = torch.zeros(19, 19, dtype=x.dtype), torch.zeros(3, 3, dtype=x.dtype)
    for one, label in zip(x.split(1), y.split(1), strict=True):
        seen = Recorder(conv)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(one), label), seen.outputs)
        seen.handle.remove()
        columns = F.unfold(one, 3, stride=2, padding=1)[0]
        columns = torch.cat([columns, columns.new_ones(1, 4)])
        a += columns @ columns.T / 5
        g += slope[0].flatten(1) @ slope[0].flatten(1).T / (5 * 4)
    torch.testing.assert_close(found["0.weight (inputs)"][0], a)
    torch.testing.assert_close(found["0.weight (outputs)"][0], g)


def test_gradients_are_those_of_an_ordinary_pass() -> None:
    model, plain = made(Twice()), made(Twice())
    watch(model, cross_entropy)
    cross_entropy(plain).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_parameters_without_a_rule_have_mean_squares_of_single_examples_gradients() -> None:
    model = made(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)))
    found = watch(model, cross_entropy)
    squares = per_example_squares(model, cross_entropy, ["1.weight", "1.bias"]).squares
    assert set(found) == {
        "0.weight (inputs)",
        "0.weight (outputs)",
        "3.weight (inputs)",
        "3.weight (outputs)",
        *squares,
    }
    for name, total in squares.items():
        torch.testing.assert_close(found[name], total / 5)


def test_a_module_that_runs_example_by_example_does_not_count_its_layers_again() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(4, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh() * self.scale)

    model = made(Scaled())
    found = watch(model, cross_entropy)
    for path in ("first", "last"):
        for kind, expected in zip(("inputs", "outputs"), by_hand(model, getattr(model, path), X, Y), strict=True):
            torch.testing.assert_close(found[f"{path}.weight ({kind})"][0], expected)
    squares = per_example_squares(model, cross_entropy, ["scale"]).squares
    torch.testing.assert_close(found["scale"], squares["scale"] / 5)


# -- which layers ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.out.weight = self.embed.weight
        self.again = self.mix

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.again(self.mix(self.embed(tokens)).tanh()))


class Own(nn.Linear):
    pass


def chosen(model: nn.Module, **options: Any) -> dict[str, tuple[str, ...]]:
    plan = plan_for(model, **options)
    return {tap.path: tap.names for tap in plan.layers} | ({"rest": plan.others} if plan.others else {})


def test_exact_types_that_share_no_weight_have_factors() -> None:
    assert chosen(Tied()) == {"mix": ("mix.weight", "mix.bias"), "rest": ("embed.weight", "out.bias")}
    assert chosen(nn.Sequential(Own(2, 2), nn.Conv1d(1, 1, 2))) == {
        "1": ("1.weight", "1.bias"),
        "rest": ("0.weight", "0.bias"),
    }
    assert chosen(nn.Linear(2, 2)) == {"": ("weight", "bias")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = nn.utils.weight_norm(nn.Linear(2, 2))
    assert chosen(normed) == {"rest": ("bias", "weight_g", "weight_v")}


def test_a_bias_belongs_to_the_matrix_if_it_is_random_where_the_weight_is() -> None:
    layer = nn.Linear(2, 2)
    assert chosen(layer, random=["weight"]) == {"": ("weight",), "rest": ("bias",)}
    assert chosen(layer, random=[]) == {"": ("weight", "bias")}
    layer.bias.requires_grad_(False)
    assert chosen(layer) == {"": ("weight",)}


def test_a_bias_apart_and_its_weight_are_watched_on_the_same_layer() -> None:
    model = made(nn.Linear(4, 3))
    found = watch(model, cross_entropy, random=["weight"])
    a, g = by_hand(model, model, X, Y)
    torch.testing.assert_close(found["weight (inputs)"][0], a[:-1, :-1])
    torch.testing.assert_close(found["weight (outputs)"][0], g)
    torch.testing.assert_close(found["bias"], g.diagonal())  # the bias's gradient is that of the output


def test_what_diagonal_names_has_no_factors() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert chosen(model, diagonal=("2.*",)) == {"0": ("0.weight", "0.bias"), "rest": ("2.weight", "2.bias")}
    assert chosen(model, diagonal=("2.bias",))["2"] == ("2.weight",)
    with pytest.raises(ValueError, match=r"diagonal '3\.weight'.*2\.weight"):
        chosen(model, diagonal=("3.weight",))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_a_layer_inside_of_a_compiled_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 3)))
    model[1].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="1: compiled"):
        plan_for(model)


# -- unusual passes --------------------------------------------------------------------------------------------------


def test_a_weight_read_from_outside_of_its_layer_is_refused_with_the_way_out() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.last = nn.Linear(4, 6), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.linear(self.encode(x).relu(), self.encode.weight.t()))

    model = made(Autoencoder())
    with pytest.raises(UnsupportedModelError, match=r"'diagonal': \['encode\.weight'\]"):
        watch(model, cross_entropy)
    plan = plan_for(model, diagonal=("encode.*",))
    for _ in range(2):  # the first pass teaches the squares' plan
        try:
            with plan.hooks() as found:
                cross_entropy(model).backward()
                result = found.result()
        except RuntimeError as error:
            assert "run the pass again" in str(error)  # noqa: PT017 - not every pass fails
    squares = per_example_squares(model, cross_entropy, ["encode.weight"]).squares
    torch.testing.assert_close(result["encode.weight"], squares["encode.weight"] / 5)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(4, 6), nn.Conv1d(2, 2, 2, groups=2), nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)
        self.looked_at = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.looked_at:
            self.norm(hidden)
        return self.last(hidden)


@pytest.mark.parametrize("looked_at", [False, True])
def test_what_the_loss_does_not_use_has_zeros(looked_at: bool) -> None:
    model = made(Unused())
    model.looked_at = looked_at
    found = watch(model, cross_entropy)
    assert found["never.weight (inputs)"].shape == (2, 3, 3)
    assert not any(found[name].any() for name in ("never.weight (inputs)", "never.weight (outputs)", "norm.weight"))
    assert found["first.weight (outputs)"].any()


def test_passes_without_gradients_and_gradients_by_inputs_alone_do_not_count() -> None:
    model = made(Twice())
    expected = watch(model, cross_entropy)

    def attacked(net: nn.Module) -> Tensor:
        with torch.no_grad():
            net(torch.cat([X, X]))
        x = X.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(net(x), Y), x)
        return cross_entropy(net)

    for name, tensor in watch(model, attacked).items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_count_once(reentrant: bool) -> None:
    model = made(nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)))
    expected = watch(model, cross_entropy)

    def saving(net: Any) -> Tensor:
        return F.cross_entropy(net[2](checkpoint(net[1], net[0](X), use_reentrant=reentrant)), Y)

    for name, tensor in watch(model, saving).items():
        torch.testing.assert_close(tensor, expected[name])


def test_low_precision_activations_give_factors_in_single_precision() -> None:
    model = made(NETWORKS["plain"]()).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = watch(model, lambda net: F.cross_entropy(net(X.float()), Y))
    exact = watch(model, lambda net: F.cross_entropy(net(X.float()), Y))
    for name, tensor in found.items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor, exact[name], rtol=0.1, atol=0.05 * float(exact[name].abs().max()))


def test_inputs_without_a_batch_or_rows_that_are_not_the_examples_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"shape \[4\], without a batch"):
        watch(made(nn.Linear(4, 3)), lambda net: net(X[0]).sum())

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x * self.shared(torch.ones(1, 4, dtype=x.dtype)))

    with pytest.raises(UnsupportedModelError, match=r"shared gets 1 rows for 5 examples.*'shared\.weight'"):
        watch(made(Odd()), cross_entropy)


def test_batches_of_two_sizes_in_one_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="batches of 2 and 3 examples"):
        watch(made(Twice()), lambda net: net(X[:2]).sum() + net(X[2:]).sum())


def test_everything_is_undone_also_after_an_error() -> None:
    model = made(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
    before = list(model.parameters())
    with pytest.raises(ZeroDivisionError):
        watch(model, lambda net: net(X).sum() * (1 / 0))
    watch(model, cross_entropy)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())
