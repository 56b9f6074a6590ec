"""Prediction with honest uncertainty."""

from credo.predict.engine import predict, predict_classes, predict_values
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction, rescaled
from credo.predict.uncertainty import DECOMPOSITIONS, Uncertainty

__all__ = [
    "DECOMPOSITIONS",
    "ClassPrediction",
    "Prediction",
    "RegressionPrediction",
    "Uncertainty",
    "predict",
    "predict_classes",
    "predict_values",
    "rescaled",
]
