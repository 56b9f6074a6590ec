"""Which parameters are random, how they lie in one vector, and which networks are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from credo.core.errors import UnsupportedModelError
from credo.core.network.flat_layout import Layout, inverse_softplus, inverse_softplus_number
from credo.core.network.selection import check_model, join, one_device, random_names


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    )


AFFINE = {"1.weight", "1.bias", "4.weight", "4.bias"}
LINEAR = ["0.weight", "0.bias", "3.weight", "3.bias", "5.weight", "5.bias"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("all", LINEAR),
        ("weights", ["0.weight", "3.weight", "5.weight"]),
        ("last", ["5.weight", "5.bias"]),
        ("3.*", ["3.weight", "3.bias"]),
        (["5.bias", "0.*"], ["0.weight", "0.bias", "5.bias"]),
        (("*.weight",), ["0.weight", "1.weight", "3.weight", "4.weight", "5.weight"]),
        (lambda name, p: p.numel() > 20, ["3.weight"]),
    ],
)
def test_random_names(choice, names: list[str]) -> None:
    assert random_names(mixed(), choice) == names


def test_random_all_leaves_norm_layers_out_and_a_star_takes_them() -> None:
    assert AFFINE & set(random_names(mixed(), "all")) == set()
    assert set(random_names(mixed(), "*")) == AFFINE | set(LINEAR)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)]
)
def test_random_all_knows_every_norm_layer_also_as_the_network_itself(norm: nn.Module) -> None:
    assert random_names(nn.Sequential(norm, nn.Linear(4, 2)), "all") == ["1.weight", "1.bias"]
    with pytest.raises(ValueError, match="chooses no parameter of"):
        random_names(norm, "all")


def test_random_never_takes_frozen_parameters() -> None:
    network = mixed()
    network[5].requires_grad_(False)
    network[3].weight.requires_grad_(False)
    assert random_names(network, "all") == ["0.weight", "0.bias", "3.bias"]
    assert set(random_names(network, "*")) == {"0.weight", "0.bias", "3.bias"} | AFFINE
    assert random_names(network, lambda name, p: True) == [n for n, p in network.named_parameters() if p.requires_grad]


def test_random_of_a_bare_layer_has_no_dot_in_its_names() -> None:
    assert random_names(nn.Linear(2, 1), "last") == ["weight", "bias"]


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), ["0.weight", "0.bias"]),
        (
            lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.RMSNorm(3)),
            ["1.weight", "1.bias"],
        ),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), ["linear2.weight", "linear2.bias"]),
    ],
)
def test_the_last_layer_is_no_normalisation(network: Callable[[], nn.Module], names: list[str]) -> None:
    assert random_names(network(), "last") == names


def test_a_network_of_normalisations_has_no_last_layer() -> None:
    with pytest.raises(ValueError, match="chooses no parameter"):
        random_names(nn.Sequential(nn.BatchNorm1d(3)), "last")
    assert (join("", "weight"), join("a.b", "weight")) == ("weight", "a.b.weight")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("0.weigth", r"Unknown parameter or glob in random= '0.weigth'. Did you mean '0.weight'"),
        (["0.*", "nothing.*"], "nothing"),
        (lambda name, p: False, "chooses no parameter of Sequential; trainable ones: 0.weight"),
        ([], "chooses no parameter"),
    ],
)
def test_random_that_chooses_nothing_is_refused(choice, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        random_names(mixed(), choice)


# -- the flat layout ----------------------------------------------------------------------------------------------


def test_layout_flattens_and_splits_to_the_same_tensors() -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(()), "c": torch.randn(0, 2), "d": torch.randn(4)}
    layout = Layout(tensors)
    flat = layout.flatten(tensors)
    assert (layout.size, flat.shape, layout.dtype) == (11, (11,), torch.float32)
    assert flat.data_ptr() not in {t.data_ptr() for t in tensors.values()}
    again = layout.split(flat)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert again["a"].data_ptr() == flat.data_ptr()  # views, no copy
    assert [layout.name_at(i) for i in (0, 5, 6, 7, 10)] == ["a", "a", "b", "d", "d"]
    with pytest.raises(IndexError, match="11 entries"):
        layout.name_at(11)


def test_a_layout_of_one_tensor_still_copies() -> None:
    tensor = torch.zeros(3)
    flat = Layout({"a": tensor}).flatten({"a": tensor})
    flat += 1
    assert torch.equal(tensor, torch.zeros(3))


def test_layout_of_several_precisions_uses_the_widest() -> None:
    tensors = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.ones(1, dtype=torch.float16)}
    layout = Layout(tensors)
    assert layout.dtype == torch.float32
    split = layout.split(layout.flatten(tensors))
    assert {n: t.dtype for n, t in split.items()} == {n: t.dtype for n, t in tensors.items()}
    assert Layout({"a": tensors["a"]}).dtype == torch.bfloat16


def test_layout_fill_takes_numbers_tensors_and_globs() -> None:
    layout = Layout({"a.w": torch.zeros(2, 2), "a.b": torch.zeros(2), "c.w": torch.zeros(1)})
    filled = layout.fill({"a.b": torch.tensor([5.0, 6.0]), "a.*": 1, "*": 2.0}, what="std")
    assert torch.equal(filled, torch.tensor([1.0, 1, 1, 1, 5, 6, 2]))
    assert layout.fill(0.5, what="std") == 0.5
    with pytest.raises(ValueError, match=r"std for 'a\.w' has shape \[5\], which does not fit \[2, 2\]"):
        layout.fill({"*": torch.ones(5)}, what="std")
    with pytest.raises(ValueError, match=r"std gives no value for 'c\.w'.*'\*'"):
        layout.fill({"a.*": 1.0}, what="std")


# -- small things -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e-30, 1e-8, 1e-3, 0.02, 1.0, 30.0, 1e4])
def test_inverse_softplus_is_stable(value: float) -> None:
    tensor = torch.tensor(value, dtype=torch.float64)
    assert torch.nn.functional.softplus(inverse_softplus(tensor)).item() == pytest.approx(value, rel=1e-12)
    assert inverse_softplus_number(value) == pytest.approx(inverse_softplus(tensor).item(), rel=1e-12, abs=1e-12)


def test_parameters_on_several_devices_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'cpu', 'meta'"):
        one_device({"a": torch.ones(1), "b": torch.ones(1, device="meta")})


def test_integer_parameters_are_refused_by_name() -> None:
    network = nn.Linear(2, 2)
    network.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"codes is torch\.int8"):
        check_model(network)


def test_a_name_like_a_glob_gives_its_value_to_no_other_parameter() -> None:
    layout = Layout({"conv3.weight": torch.zeros(2)}, known=["conv[3x3].weight", "conv3.weight"])
    filled = layout.fill({"conv[3x3].weight": 2.0, "*": 1.0}, what="Prior std")
    assert torch.equal(torch.as_tensor(filled), torch.ones(2))
