"""Models by name, with a record from which a saved model is rebuilt."""

import inspect
import json
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from credo.core.errors import unknown
from credo.models.bottleneck import resnet50
from credo.models.convnets import alexnet, convnet, lenet5, three_conv_three_fc, vgg16_bn
from credo.models.large import alexnet_imagenet, vgg16_large, vgg16_small
from credo.models.mlp import mlp
from credo.models.own import is_own, own_model
from credo.models.resnet import resnet18, resnet_cifar
from credo.models.wide_resnet import wide_resnet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "convnet": convnet,
    "alexnet": alexnet,
    "alexnet-half": partial(alexnet, width=0.5),
    "3conv3fc": three_conv_three_fc,
    "resnet-cifar": resnet_cifar,
    "resnet20": partial(resnet_cifar, depth=20),
    "resnet56": partial(resnet_cifar, depth=56),
    "resnet18": resnet18,
    "vgg16-bn": vgg16_bn,
    "vgg16-small": vgg16_small,
    "wide-resnet": wide_resnet,
    "wrn-28-10": partial(wide_resnet, depth=28, widen=10),
    "alexnet-imagenet": alexnet_imagenet,
    "vgg16-large": vgg16_large,
    "resnet50": resnet50,
}


# Offered to every network; one of the user's own need not take them.
OFFERED = ("inputs", "classes", "seed")


def model_names() -> list[str]:
    """Return the names that `build_model` accepts, sorted."""
    return sorted(MODELS)


def build_model(name: str, **options: Any) -> nn.Module:
    """Build a model by name.

    Its attribute `credo_spec`, {"name": ..., "options": {...}}, holds all options with defaults, in a form that
    survives JSON: `build_model(spec["name"], **spec["options"])` builds the same architecture again.

    Args:
        name: A name in `MODELS`, or one that `use_own_model` was called with.
        **options: Options of the model; all take `inputs` (shape of one example), `classes`, `normalize` and `seed`
            (None: weights from torch's global generator). Of your own, `inputs`, `classes` and `seed` may be missing.
    """
    if is_own(name):
        return _build_own(name, options)
    known = model_options(name)
    surplus = [unknown(f"option of {name}", option, ("name", *known)) for option in options if option not in known]
    if surplus:
        raise ValueError("\n".join(surplus))
    defaults = {option: p.default for option, p in known.items() if p.default is not p.empty}
    complete = {option: _plain(name, option, value) for option, value in (defaults | options).items()}
    model = MODELS[name](**complete)
    vars(model)["credo_spec"] = {"name": name, "options": complete}
    return model


def _build_own(name: str, options: dict[str, Any]) -> nn.Module:
    """Build a network of the user's own; without an argument `seed`, torch's generator is seeded for it."""
    known = model_options(name)
    given = {option: value for option, value in options.items() if option in known or option not in OFFERED}
    surplus = [unknown(f"option of {name}", option, ("name", *known)) for option in given if option not in known]
    if surplus:
        raise ValueError("\n".join(surplus))
    complete = {option: _plain(name, option, value) for option, value in options.items()}
    seed = complete.get("seed")
    with torch.random.fork_rng(devices=[], enabled=seed is not None and "seed" not in known):
        if seed is not None and "seed" not in known:
            torch.manual_seed(seed)
        model = own_model(name)(**{option: complete[option] for option in given})
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {type(model).__name__}; it must return the network, an nn.Module.")
    vars(model)["credo_spec"] = {"name": name, "options": complete}
    return model


def model_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a model, without those that the name fixes (the depth of resnet20)."""
    if is_own(name):
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {key: p for key, p in inspect.signature(own_model(name)).parameters.items() if p.kind in named}
    if name not in MODELS:
        own = " Your own networks are file.py:function or package.module:Class."
        raise ValueError(unknown("model", name, model_names()) + own)
    build = MODELS[name]
    fixed = build.keywords if isinstance(build, partial) else {}
    parameters = inspect.signature(build).parameters
    return {option: parameter for option, parameter in parameters.items() if option not in fixed}


def _plain(model: str, option: str, value: Any) -> Any:
    """Return `value` as after JSON, so that the first build sees what every later one sees."""
    try:
        # operator.index converts NumPy and torch integers and raises on everything else.
        return json.loads(json.dumps(value, default=operator.index, allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(
            f"{model}: {option}={value!r} can't be stored in a file; use finite numbers, strings or lists."
        ) from None
