"""Low-rank adapters (LoRA; Hu et al. 2022): a large frozen network, and small trainable matrices beside some layers.

A chosen layer y = Wx + b becomes y = Wx + b + (alpha/rank)·B·A·x with A of shape [rank, inputs], B of [outputs, rank].
B is zero at first, so the network's outputs are unchanged. A and B are plain linear layers: every method has its
rules for them, and `random="all"`, which leaves out what is frozen, is a posterior over adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from credo.core.support.keywords import checked_keywords
from credo.core.support.name_patterns import chosen_names
from credo.core.support.validate import checked_count, is_number


class LoRALayer(nn.Module):
    """A frozen linear layer with an adapter beside it.

    Args:
        base: An `nn.Linear`, or a `Conv1D` of Hugging Face, which is one with a transposed weight.
        rank: Rows of A.
        alpha: The adapter's output is multiplied by alpha/rank.
        generator: Draws A.
    """

    def __init__(self, base: nn.Module, *, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = _weight(base)
        inputs, outputs = weight.shape if _is_transposed(base) else weight.shape[::-1]
        like = {"device": weight.device, "dtype": weight.dtype}
        self.in_features, self.out_features, self.scale = inputs, outputs, alpha / rank
        self.base = base.requires_grad_(False)
        self.lora_a = nn.utils.skip_init(nn.Linear, inputs, rank, bias=False, **like)
        self.lora_b = nn.utils.skip_init(nn.Linear, rank, outputs, bias=False, **like)
        first = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        with torch.no_grad():
            self.lora_a.weight.copy_(first)
            self.lora_b.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output plus the adapter's."""
        out: Tensor = self.base(x) + self.scale * self.lora_b(self.lora_a(x))
        return out

    @property
    def weight(self) -> Tensor:
        """The weight of one layer that computes the same, for modules that read it instead of calling the layer."""
        added: Tensor = self.scale * (self.lora_b.weight @ self.lora_a.weight)
        return _weight(self.base) + (added.T if _is_transposed(self.base) else added)

    @property
    def bias(self) -> Tensor | None:
        """The base layer's."""
        return self.base._parameters["bias"]

    def merged(self) -> nn.Module:
        """A layer of the base's type that computes the same up to rounding."""
        layer = copy.deepcopy(self.base)
        _weight(layer).data = self.weight.detach()
        return layer


@checked_keywords()
def lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    target: str | Sequence[str] = ("*query", "*value"),
    train: str | Sequence[str] = (),
    seed: int = 0,
) -> nn.Module:
    """Freeze a network and put adapters beside some of its linear layers; return it. It is changed in place.

    Args:
        model: The network. Its outputs are the same as before until adapters are trained.
        rank: Rank of the added matrices.
        alpha: Adapters are multiplied by alpha/rank.
        target: Name globs of linear layers, `nn.Linear` or Hugging Face's `Conv1D`. Raises ValueError if one matches
            no such layer.
        train: Name globs of parameters that are trained as well, such as those of a new classifier: `"classifier.*"`.
        seed: Seed of A's first values.
    """
    rank = checked_count("rank", rank)
    if not is_number(alpha) or not alpha > 0:
        raise ValueError(f"alpha={alpha!r} must be a positive number.")
    if has_adapters(model):
        raise ValueError(f"{type(model).__name__} has adapters already: merge them first, credo.merge_lora(model).")
    named = model.named_modules(remove_duplicate=False)
    layers = {path: module for path, module in named if path and _is_linear(module)}
    chosen = chosen_names(layers, _globs(target), "linear layer or glob in target=")
    trained = chosen_names(dict(model.named_parameters()), _globs(train), "parameter or glob in train=")
    inside = [name for name in trained if name.rpartition(".")[0] in chosen]
    if inside:
        raise ValueError(f"train= chooses {inside[0]}, whose layer gets an adapter: leave it out of train= or target=.")
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    adapted: dict[nn.Module, LoRALayer] = {}  # one for a layer that is used in several places
    for path in chosen:
        layer = layers[path]
        if layer not in adapted:
            adapted[layer] = LoRALayer(layer, rank=rank, alpha=float(alpha), generator=generator).train(layer.training)
        _set(model, path, adapted[layer])
    return model


@checked_keywords()
def merge_lora(model: nn.Module) -> nn.Module:
    """Return a copy of a network in which each adapter is added to its layer's weight; outputs are equal to rounding.

    Parameters of the copy stay frozen where they were.

    Args:
        model: What `lora` returned, a posterior's `model` (its mean), or the network of `posterior.sampled()` (a draw).
    """
    if isinstance(model, LoRALayer):
        return model.merged()
    adapters = {path: module for path, module in model.named_modules() if isinstance(module, LoRALayer)}
    if not adapters:
        raise ValueError(f"{type(model).__name__} has no adapters of credo.lora.")
    # The merged layers take the places of the adapted ones while copying.
    memo = {id(module): module.merged() for module in adapters.values()}
    return copy.deepcopy(model, memo)


def has_adapters(model: nn.Module) -> bool:
    """Whether a network has adapters, of `lora` or of PEFT."""
    return any(
        isinstance(module, LoRALayer) or any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__)
        for module in model.modules()
    )


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters of a network with adapters, by all their names; of another network none."""
    if not has_adapters(model):
        return {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.detach() for name, p in named if not p.requires_grad}


def _globs(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)
