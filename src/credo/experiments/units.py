"""Convert between units of the data and of the network, in float64: tables are standardised for training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credo.data import Dataset
from credo.data.tables.columns import standardised
from credo.predict import DistributionPrediction, Prediction, QuantilePrediction, RegressionPrediction, rescaled

_SCALES = ("input_mean", "input_std", "target_mean", "target_std")


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """Properties of the data that predictions on new inputs need; stored with the model."""
    tensors = {key: getattr(dataset, key) for key in _SCALES}
    return {
        "data": dataset.name,
        "input_shape": list(dataset.input_shape),
        "class_names": None if dataset.class_names is None else list(dataset.class_names),
        **{key: None if value is None else value.tolist() for key, value in tensors.items()},
        "columns": None if dataset.columns is None else dataset.columns.to_dict(),
    }


def network_inputs(x: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """Standardise new inputs for the network of a run with these `data_facts`; float32."""
    mean, std = _scale(facts, "input")
    return x.float() if mean is None or std is None else standardised(x, mean, std)


def in_target_units(prediction: Prediction, scales: Dataset | Mapping[str, Any]) -> Prediction:
    """A regression in the units of its table, as float64; other predictions unchanged.

    Args:
        prediction: Prediction in the units of training.
        scales: The data of the run, or its `data_facts`.
    """
    mean, std = _scale(scales, "target")
    if mean is None or std is None:
        return prediction
    if isinstance(prediction, DistributionPrediction | QuantilePrediction):
        return prediction.in_units(mean, std)
    return rescaled(prediction, mean, std) if isinstance(prediction, RegressionPrediction) else prediction


def _scale(scales: Dataset | Mapping[str, Any], kind: str) -> tuple[Tensor | None, Tensor | None]:
    keys = (f"{kind}_mean", f"{kind}_std")
    found = [getattr(scales, key) if isinstance(scales, Dataset) else scales[key] for key in keys]
    mean, std = (None if value is None else torch.as_tensor(value, dtype=torch.float64) for value in found)
    return mean, std
