"""Hooks that live for one call, and which layers they may cover."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from credo.core.network.layer_hooks import LayerUseError, covered_layers, hooked


def add_one(path: str):
    return lambda layer, x, output: output + 1


def covered(model: nn.Module, tied: set[str] | None = None) -> list[str]:
    return list(covered_layers(model, tied or set()))


def test_covered_are_exact_types_with_their_own_weight() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1), Odd(2, 2), nn.Bilinear(2, 2, 2)
    )
    assert covered(model) == ["0", "1", "2", "3"]
    assert covered(model, {"1.weight"}) == ["0", "2", "3"]
    assert covered(nn.Linear(2, 2)) == [""]
    assert covered(nn.MultiheadAttention(2, 1)) == []
    assert covered(nn.TransformerEncoderLayer(2, 1, 4)) == ["linear1", "linear2"]


def test_layers_that_compute_their_weight_from_others_are_not_covered() -> None:
    assert covered(parametrizations.weight_norm(nn.Linear(2, 2))) == []
    assert covered(prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5)) == []
    if hasattr(nn.utils, "weight_norm"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            assert covered(nn.utils.weight_norm(nn.Linear(2, 2))) == []


def test_outputs_are_replaced_inside_and_hooks_gone_after() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(3, 2)
    plain = layer(x)
    with hooked({"": layer}, add_one):
        assert torch.equal(layer(x), plain + 1)
    assert torch.equal(layer(x), plain)
    assert not layer._forward_hooks


def test_the_users_own_hooks_see_the_replaced_output() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(3, 2)
    plain = layer(x)
    layer.register_forward_hook(lambda module, inputs, output: output * 10)
    with hooked({"": layer}, add_one):
        torch.testing.assert_close(layer(x), (plain + 1) * 10)
    assert len(layer._forward_hooks) == 1


def test_hooks_are_gone_after_an_error_which_is_not_hidden() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), hooked({"": layer}, add_one):
        raise ZeroDivisionError
    assert not layer._forward_hooks


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never, self.once, self.twice = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.once(x)))


def test_layers_that_do_not_run_exactly_once_are_named_together_at_the_end_of_the_pass() -> None:
    model = Uses()
    done = []

    def run() -> None:
        with hooked(dict(model.named_children()), add_one):
            done.append(model(torch.ones(1, 2)))

    with pytest.raises(LayerUseError, match="never, twice") as error:
        run()
    assert error.value.paths == ["never", "twice"]
    assert len(done) == 1
    assert not any(layer._forward_hooks for layer in model.children())


def test_an_input_given_by_keyword_counts_as_not_covered() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(LayerUseError), hooked({"": layer}, add_one):
        layer(input=torch.ones(1, 2))
