"""Prediction with honest uncertainty."""

from credo.predict.predictor import Predictor, predictor
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction, rescaled
from credo.predict.run import predict, predict_classes, predict_values
from credo.predict.uncertainty import DECOMPOSITIONS, Uncertainty

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
