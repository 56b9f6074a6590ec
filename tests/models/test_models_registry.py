import copy
import json
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from credo.models import MODELS, Normalize, build_model, model_names

# A second form of most models, so that the options too go through every test here.
# Those of the literature that are too large for a test, in a size that is not.
SMALLER = {
    "alexnet-imagenet": {"inputs": (3, 64, 64), "hidden": (16,), "classes": 5},
    "vgg16-large": {"inputs": (3, 32, 32), "hidden": (16,), "classes": 5},
    "resnet50": {"inputs": (3, 32, 32), "width": 8, "classes": 5},
    "wide-resnet": {"depth": 10, "widen": 2},
    "wrn-28-10": {"inputs": (3, 8, 8)},
}
BUILDS = [(name, SMALLER.get(name, {})) for name in model_names()] + [
    ("mlp", {"inputs": (13,), "classes": 1, "hidden": [7], "activation": "tanh", "normalize": (0.5, 2.0)}),
    ("mlp", {"inputs": (2, 3), "hidden": (), "input_range": (0, 2)}),
    ("lenet5", {"inputs": (3, 32, 32), "classes": 4, "activation": "softplus", "beta": 5.0, "dropout": 0.2}),
    ("lenet5", {"inputs": (1, 20, 17), "activation": "gelu"}),
    ("convnet", {"batch_norm": True, "dropout": 0.5, "channels": (4, 5, 6), "hidden": (9, 8)}),
    ("alexnet", {"width": 0.25, "variant": "vogn", "activation": "softplus", "dropout": 0.1}),
    ("resnet-cifar", {"inputs": (1, 28, 28), "depth": 8, "normalize": None, "classes": 3}),
    ("resnet18", {"stem": "imagenet", "inputs": (3, 40, 48)}),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(BUILDS)]
each_build = pytest.mark.parametrize(("name", "options"), BUILDS, ids=IDS)


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def example_batch(model, size=4):
    inputs = model.credo_spec["options"]["inputs"]
    return torch.rand(size, *inputs, generator=torch.Generator().manual_seed(1))


@each_build
def test_output_has_one_column_per_class_and_gradients_reach_everything(name, options):
    model = build_model(name, **options, seed=0)
    x = example_batch(model).requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # for dropout
        out = model(x)
    classes = model.credo_spec["options"]["classes"]
    assert out.shape == (4, classes)
    loss = F.cross_entropy(out, torch.arange(4) % classes) if classes > 1 else out.square().mean()
    loss.backward()
    dead = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert dead == []
    assert x.grad.abs().sum() > 0


@each_build
def test_spec_rebuilds_the_same_architecture(name, options):
    model = build_model(name, **options, seed=0)
    spec = json.loads(json.dumps(model.credo_spec))
    again = build_model(spec["name"], **spec["options"])
    assert shapes(again) == shapes(model)
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    again.load_state_dict(model.state_dict())
    x = example_batch(model, size=2)
    assert torch.equal(again.eval()(x), model.eval()(x))


@pytest.mark.part(8)
@each_build
def test_seed_fixes_the_weights_and_leaves_the_global_generator_alone(name, options):
    before = torch.get_rng_state()
    first = build_model(name, **options, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.rand(5)  # a different global state must not matter
        second = build_model(name, **options, seed=3)
    other = build_model(name, **options, seed=4)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key])
    weights = [key for key, p in first.named_parameters() if p.ndim > 1]
    assert all(not torch.equal(first.state_dict()[key], other.state_dict()[key]) for key in weights)


def test_without_a_seed_the_global_generator_decides():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        first, second = build_model("mlp"), build_model("mlp")
        torch.default_generator.manual_seed(5)
        third = build_model("mlp")
    assert torch.equal(first.fc1.weight, third.fc1.weight)
    assert not torch.equal(first.fc1.weight, second.fc1.weight)


def test_global_generator_is_put_back_when_the_build_fails():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="dropout"):
        build_model("lenet5", dropout=1.0, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_weights_are_made_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        model = build_model("resnet20", seed=0)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert torch.equal(model.conv1.weight, build_model("resnet20", seed=0).conv1.weight)


def test_unseeded_model_can_be_built_without_memory_and_filled_later():
    source = build_model("resnet20", seed=0)
    with torch.device("meta"):
        model = build_model("resnet20")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    model.load_state_dict(source.state_dict(), assign=True)
    x = example_batch(source, size=2)
    assert torch.equal(model.eval()(x), source.eval()(x))


@pytest.mark.parametrize("name", model_names())
def test_first_layer_is_normalize(name):
    assert isinstance(next(iter(build_model(name, **SMALLER.get(name, {})).children())), Normalize)


def test_spec_holds_the_defaults_in_json_form():
    assert build_model("mlp", hidden=(5,), seed=2).credo_spec == {
        "name": "mlp",
        "options": {
            "inputs": [1, 28, 28],
            "classes": 10,
            "hidden": [5],
            "activation": "relu",
            "beta": 1.0,
            "dropout": 0.0,
            "input_range": None,
            "normalize": None,
            "seed": 2,
        },
    }


def test_spec_survives_copies_and_is_no_part_of_the_state():
    model = build_model("mlp", hidden=(3,), seed=0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.credo_spec == model.credo_spec
        assert twin.credo_spec is not model.credo_spec
    assert not any("credo_spec" in key for key in model.state_dict())


def test_whole_numbers_of_numpy_and_torch_are_accepted():
    model = build_model("mlp", inputs=torch.zeros(1, 8, 8).shape, classes=np.int64(7), seed=0)
    assert model.credo_spec["options"]["inputs"] == [1, 8, 8]
    assert json.dumps(model.credo_spec["options"]["classes"]) == "7"
    assert model(torch.zeros(1, 1, 8, 8)).shape == (1, 7)


def test_names_are_those_of_the_registry():
    assert model_names() == sorted(MODELS)


@pytest.mark.parametrize(("wrong", "nearest"), [("resnet-20", "resnet20"), ("LeNet5", "lenet5"), ("vgg16", "vgg16-bn")])
def test_unknown_name_suggests_the_nearest(wrong, nearest):
    with pytest.raises(ValueError, match=f"{wrong}.*mean '{nearest}'.*Possible: 3conv3fc, alexnet"):
        build_model(wrong)


def test_all_unknown_options_are_named_at_once():
    with pytest.raises(ValueError) as caught:
        build_model("mlp", hiden=(3,), drop_out=0.1)
    assert "'hiden'. Did you mean 'hidden'?" in str(caught.value)
    assert "'drop_out'. Did you mean 'dropout'?" in str(caught.value)


@pytest.mark.parametrize(("name", "option"), [("resnet20", "depth"), ("alexnet-half", "width")])
def test_what_the_name_fixes_is_no_option(name, option):
    with pytest.raises(ValueError, match=f"'{option}'"):
        build_model(name, **{option: 1})


@pytest.mark.parametrize("value", [object(), float("nan"), torch.zeros(2)])
def test_options_that_no_file_can_hold_are_refused(value):
    with pytest.raises(ValueError, match=r"dropout=.*stored"):
        build_model("mlp", dropout=value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"activation": "rellu"}, "mean 'relu'"),
        ("mlp", {"activation": "rellu", "hidden": ()}, "mean 'relu'"),
        ("mlp", {"activation": None}, "Unknown activation 'None'"),
        ("mlp", {"beta": 2.0}, "only softplus"),
        ("mlp", {"activation": "softplus", "beta": 0.0}, "beta must be positive"),
        ("mlp", {"hidden": 100}, "hidden must be a list"),
        ("mlp", {"hidden": (100, 0)}, "hidden must be a list"),
        ("mlp", {"classes": 0}, "classes must be a positive"),
        ("mlp", {"classes": True}, "classes must be a positive"),
        ("mlp", {"dropout": -0.1}, "dropout must be"),
        ("mlp", {"inputs": ()}, "shape of one example"),
        ("mlp", {"inputs": 784}, "shape of one example"),
        ("mlp", {"input_range": (0, 2), "normalize": (0.5, 0.5)}, "give one of them"),
        ("mlp", {"input_range": (0, 1, 2)}, "pair"),
        ("mlp", {"input_range": 2}, "pair"),
        ("convnet", {"channels": 16}, "channels must be a list"),
        ("convnet", {"hidden": 8}, "hidden must be a list.*got 8"),
        ("vgg16-small", {"hidden": 8}, "hidden must be a list.*got 8"),
        ("vgg16-small", {"hidden": "88"}, "hidden must be a list.*got '88'"),
        ("lenet5", {"inputs": (784,)}, "channels, height, width"),
        ("alexnet", {"variant": "vogm"}, "mean 'vogn'"),
        ("alexnet", {"width": 0}, "width must be positive"),
        ("resnet18", {"stem": "imagnet"}, "mean 'imagenet'"),
        ("resnet18", {"classes": 2.5}, "classes must be a positive"),
        ("resnet50", {"width": -3}, "width must be a positive whole number, got -3"),
        ("resnet50", {"width": 0}, "width must be a positive"),
        ("resnet50", {"width": 1.5}, "width must be a positive whole number, got 1.5"),
        ("wide-resnet", {"depth": 27}, "6n \\+ 4.*got 27"),
        ("wide-resnet", {"widen": 0}, "widen must be a positive"),
        ("wide-resnet", {"dropout": 1.0}, "dropout must be"),
        ("resnet-cifar", {"depth": 21}, "6n \\+ 2.*got 21"),
        ("resnet-cifar", {"depth": 2}, "6n \\+ 2.*got 2"),
        (
            "resnet20",
            {"inputs": (1, 28, 28), "normalize": ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))},
            "3 values for inputs with 1 channels.*normalize=None",
        ),
    ],
)
def test_bad_values_are_refused_with_the_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, **options)
