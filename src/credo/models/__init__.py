"""Networks by name: small standard ones, and those of the reproduced papers."""

from credo.models.lora import LoRALayer, lora, merge_lora
from credo.models.normalize import Normalize, Rescale, input_statistics, normalized
from credo.models.own import use_own_model
from credo.models.registry import MODELS, build_model, model_names
from credo.models.summary import LayerSize, Summary, summary
from credo.models.weights import load_cifar_resnet_weights, load_named_weights

__all__ = [
    "MODELS",
    "LayerSize",
    "LoRALayer",
    "Normalize",
    "Rescale",
    "Summary",
    "build_model",
    "input_statistics",
    "load_cifar_resnet_weights",
    "load_named_weights",
    "lora",
    "merge_lora",
    "model_names",
    "normalized",
    "summary",
    "use_own_model",
]
