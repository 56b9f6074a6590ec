"""Predict with a posterior, and decompose the uncertainty."""

from credo.predict.predictor import Predictor, predictor
from credo.predict.result import (
    DECOMPOSITIONS,
    ClassPrediction,
    Prediction,
    RegressionPrediction,
    Uncertainty,
    rescaled,
)
from credo.predict.run import predict, predict_classes, predict_values

__all__ = [
    "DECOMPOSITIONS",
    "ClassPrediction",
    "Prediction",
    "Predictor",
    "RegressionPrediction",
    "Uncertainty",
    "predict",
    "predict_classes",
    "predict_values",
    "predictor",
    "rescaled",
]
