"""Predict where only one kind of prediction makes sense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from credo.core.posterior import Posterior
from credo.predict.result import ClassPrediction, RegressionPrediction
from credo.predict.run import predict


def predict_classes(posterior: Posterior, inputs: Tensor | Iterable[Any], **options: Any) -> ClassPrediction:
    """Call `predict` with these arguments; raise TypeError unless the result is a `ClassPrediction`."""
    prediction = predict(posterior, inputs, **options)
    if not isinstance(prediction, ClassPrediction):
        raise TypeError(f"A class likelihood is needed; this posterior has {type(posterior.likelihood).__name__}.")
    return prediction


def predict_values(posterior: Posterior, inputs: Tensor | Iterable[Any], **options: Any) -> RegressionPrediction:
    """Call `predict` with these arguments; raise TypeError unless the result is a `RegressionPrediction`."""
    prediction = predict(posterior, inputs, **options)
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(f"A Gaussian likelihood is needed; this posterior has {type(posterior.likelihood).__name__}.")
    return prediction
