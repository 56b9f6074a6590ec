"""Private copies of module trees: they share tensors, follow the original, and leave it alone."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from credo.core.network.isolation import NotIsolatedError
from credo.core.network.skeleton import ChangedStructureError, Skeleton
from credo.core.network.substitute import substituted

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Helper:
    """A plain object that a network keeps a layer in."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class ByClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.run = lambda x: self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class ByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.run = {"first": self._first}

    def _first(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run["first"](x)


class ByPartial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.run = functools.partial(lambda layer, x: layer(x), self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class ByObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.helpers = [Helper(self.layer)]

    def forward(self, x: Tensor) -> Tensor:
        return self.helpers[0].layer(x)


class ByParent(nn.Module):
    """A child that calls its parent's layer, through a cycle of references."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.child = nn.Linear(4, 4), nn.Identity()
        object.__setattr__(self.child, "parents", (self,))

    def forward(self, x: Tensor) -> Tensor:
        return self.child.parents[0].layer(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.view(len(x), 2, 2))[0][:, -1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


NETWORKS: dict[str, Any] = {
    "linear": lambda: nn.Linear(4, 4),
    "closure": ByClosure,
    "method": ByMethod,
    "partial": ByPartial,
    "object": ByObject,
    "parent": ByParent,
    "tied": Tied,
    "gru": Recurrent,
    "attention": Attention,
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_other_weights_act_in_the_copy_and_nowhere_else(network: Any) -> None:
    model = network().eval()
    skeleton = Skeleton(model)
    skeleton.refresh()
    copy = skeleton.module
    assert torch.equal(copy(X), model(X))
    assert [id(p) for p in copy.parameters()] == [id(p) for p in model.parameters()]
    before, other = model(X), {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with substituted(copy, other):
        assert not torch.equal(copy(X), before)
        assert torch.equal(model(X), before)
    assert torch.equal(copy(X), before)
    assert skeleton.trusted == {model.training}  # the pass was seen to read no weight of the original


def test_the_weights_of_old_style_weight_norm_are_computed_in_the_copy() -> None:
    with pytest.warns(FutureWarning):
        model = weight_norm(nn.Linear(4, 4))
    model(X)
    computed, wanted = model.weight, model(X)
    skeleton = Skeleton(model)
    skeleton.refresh()
    with substituted(skeleton.module, {"weight_g": torch.zeros(4, 1)}):
        assert torch.equal(skeleton.module(X), model.bias.expand(5, 4))
    assert computed is not model.weight  # by the second pass of the original
    assert torch.equal(model(X), wanted)


def test_private_tensors_do_not_follow_the_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[0].bias.requires_grad_(False)
    skeleton = Skeleton(model)
    skeleton.refresh("trained")
    before = model(X)
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[1].running_mean.add_(1.0)
    assert torch.equal(skeleton.module(X), before)
    assert skeleton.module[0].bias is model[0].bias  # frozen: training does not change it
    skeleton.share()
    assert torch.equal(skeleton.module(X), model(X))


def test_modes_attributes_and_hooks_are_those_of_the_original_at_each_refresh() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    skeleton = Skeleton(model)
    copy, seen = skeleton.module, []
    model.eval()
    model[1].p = 0.25
    model.note = "new"
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    skeleton.refresh()
    assert not copy[1].training
    assert (copy[1].p, copy.note) == (0.25, "new")
    copy(X)
    assert seen == [copy[0]]
    handle.remove()
    del model.note
    skeleton.refresh()
    copy(X)
    assert len(seen) == 1
    assert not hasattr(copy, "note")


def test_hooks_of_the_copy_are_gone_after_a_refresh_and_never_in_the_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    skeleton = Skeleton(model)
    skeleton.refresh()
    skeleton.module[0].register_forward_hook(lambda *_: torch.zeros(5, 4))
    assert not torch.equal(skeleton.module(X), model(X))
    skeleton.refresh()
    assert torch.equal(skeleton.module(X), model(X))


def test_a_hook_that_is_a_method_of_the_network_is_bound_to_the_copy() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))
            self.layer.register_forward_hook(self._scaled)

        def _scaled(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model = Hooked()
    skeleton = Skeleton(model)
    skeleton.refresh()
    with substituted(skeleton.module, {"scale": torch.zeros(())}):
        assert torch.equal(skeleton.module(X), torch.zeros(5, 4))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.last = nn.Linear(4, 4), 0, None
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average = 0.5 * self.average + 0.5 * x.mean(0)
        self.last = self.layer(x)
        return self.last


def test_buffers_and_counters_that_a_pass_assigns_go_back_when_asked_for() -> None:
    model = Counting()
    skeleton = Skeleton(model)
    skeleton.refresh()
    skeleton.module(X)
    assert model.calls == 0
    assert not model.average.any()
    skeleton.write_back()
    assert model.calls == 1
    assert torch.equal(model.average, 0.5 * X.mean(0))
    assert model.last is None  # it holds a graph over the draw's weights
    skeleton.refresh()
    skeleton.module(X)
    skeleton.write_back()
    assert model.calls == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.append(nn.Linear(4, 4)),
        lambda model: model.__setitem__(0, nn.Linear(4, 4)),
        lambda model: model[0].register_parameter("bias", None) or model[0].register_parameter("shift", None),
        lambda model: model[0].register_buffer("extra", torch.zeros(1)),
        lambda model: parametrizations.weight_norm(model[0]),
    ],
    ids=["added", "replaced", "parameter", "buffer", "class"],
)
def test_other_modules_or_parameters_need_a_new_skeleton(change: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    skeleton = Skeleton(model)
    change(model)
    with pytest.raises(ChangedStructureError):
        skeleton.refresh()


LAYER = nn.Linear(4, 4)


class ByGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = LAYER

    def forward(self, x: Tensor) -> Tensor:
        return LAYER(x)


def test_a_network_that_reads_a_global_variable_is_found_out_by_its_first_pass() -> None:
    skeleton = Skeleton(ByGlobal())
    skeleton.refresh("trained")
    with pytest.raises(NotIsolatedError, match="global variable"):
        skeleton.module(X)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_compiled_modules_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0]._compiled_call_impl = lambda x: x  # as model[0].compile() sets it
    with pytest.raises(TypeError, match="compiled"):
        Skeleton(model)
