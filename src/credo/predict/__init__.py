"""Predict with a posterior, and decompose the uncertainty."""

from credo.predict.kinds.dense import DenseClassPrediction
from credo.predict.kinds.distributions import DistributionPrediction
from credo.predict.kinds.expected import predict_classes, predict_values
from credo.predict.kinds.labels import MultiLabelPrediction
from credo.predict.kinds.quantiles import QuantilePrediction
from credo.predict.predictor import Predictor, predictor
from credo.predict.result import (
    DECOMPOSITIONS,
    ClassPrediction,
    Prediction,
    RegressionPrediction,
    Uncertainty,
    rescaled,
)
from credo.predict.run import predict

__all__ = [
    "DECOMPOSITIONS",
    "ClassPrediction",
    "DenseClassPrediction",
    "DistributionPrediction",
    "MultiLabelPrediction",
    "Prediction",
    "Predictor",
    "QuantilePrediction",
    "RegressionPrediction",
    "Uncertainty",
    "predict",
    "predict_classes",
    "predict_values",
    "predictor",
    "rescaled",
]
