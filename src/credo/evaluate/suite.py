"""All metrics of a prediction at once, as plain numbers for records and tables."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from credo.core.network.nonfinite_rows import blamed_rows
from credo.core.support.keywords import checked_keywords
from credo.evaluate.calibration import adaptive_ece, classwise_ece, ece
from credo.evaluate.classification import brier, brier_each, correct
from credo.evaluate.detection import misclassification_auroc, ood_detection, ood_score
from credo.evaluate.guarantees.metrics import interval_metrics, risk_metrics, set_metrics
from credo.evaluate.intervals import Interval, bootstrap, bootstrap_metric
from credo.evaluate.other_targets import concordance, counted, label_metrics, position_metrics, quantile_metrics
from credo.evaluate.predictive import coverage_of
from credo.evaluate.regression import miscalibration_area, rmse
from credo.evaluate.selective import augrc, aurc, retained_accuracy
from credo.evaluate.smooth_calibration import debiased_ece, smooth_ece
from credo.predict import (
    ClassPrediction,
    DenseClassPrediction,
    DistributionPrediction,
    MultiLabelPrediction,
    Prediction,
    QuantilePrediction,
    RegressionPrediction,
)


def quick_metrics(prediction: Prediction) -> dict[str, float]:
    """Accuracy or RMSE, and NLL: cheap enough for every epoch."""
    if isinstance(prediction, DenseClassPrediction):
        return quick_metrics(prediction.by_position())
    targets, log_likelihood = _known(prediction)
    if isinstance(prediction, MultiLabelPrediction):
        known = torch.ones_like(targets, dtype=torch.bool) if prediction.known is None else prediction.known
        hits = (prediction.labels == (targets > 0.5))[known]
        rows = known.flatten(1).any(1)
        return {"accuracy": float(hits.double().mean()), "nll": float(-log_likelihood[rows].double().mean())}
    nll = float(-log_likelihood.double().mean())
    if isinstance(prediction, QuantilePrediction):
        return {"pinball": float(prediction.pinball().double().mean()), "nll": nll}
    if isinstance(prediction, DistributionPrediction):
        values = prediction.likelihoods[0].values(targets)
        if values.shape == targets.shape:
            return {"rmse": rmse(prediction.mean, values), "nll": nll}
        return {"concordance": concordance(targets[:, 0], targets[:, 1], prediction.mean), "nll": nll}
    if isinstance(prediction, ClassPrediction):
        return {"accuracy": float((prediction.labels == targets).double().mean()), "nll": nll}
    if isinstance(prediction, RegressionPrediction):
        return {"rmse": rmse(prediction.mean, targets), "nll": nll}
    raise TypeError(_not_a_prediction(prediction))


def _not_a_prediction(given: object) -> str:
    return (
        "Metrics are of a prediction with targets, credo.predict(posterior, batches); got a "
        f"{type(given).__name__}. The functions of credo.evaluate take arrays."
    )


@checked_keywords()
def measure(
    prediction: Prediction,
    *,
    bins: int = 15,
    outside: dict[str, ClassPrediction] | None = None,
    scores: tuple[str, ...] = ("entropy", "mutual-information", "msp"),
    intervals: bool = True,
) -> dict[str, Any]:
    """Compute every metric of a prediction with targets.

    Args:
        prediction: Made from batches of (inputs, targets).
        bins: Number of bins of the calibration errors.
        outside: Predictions on out-of-distribution sets, by name: adds AUROC, AUPR and FPR@95 of detecting them.
        scores: Uncertainty scores to detect them by (`OOD_SCORES`).
        intervals: Add 95 % bootstrap intervals over the inputs for the main metrics.
    """
    if isinstance(prediction, DenseClassPrediction):
        rows, targets = replace(prediction.by_position(), sets=None), prediction.targets
        metrics = _classes(rows, bins, {}, scores, False)  # neighbours depend on each other: no bootstrap over them
        assert targets is not None
        return {
            **metrics,
            **position_metrics(prediction, targets),
            **_risk(prediction.sets, counted(prediction, targets)),
        }
    if isinstance(prediction, MultiLabelPrediction):
        targets = _known(prediction)[0]
        metrics = {**quick_metrics(prediction), **label_metrics(prediction, targets)}
        return {**metrics, **_risk(prediction.sets, targets)}
    if isinstance(prediction, QuantilePrediction):
        return {**quick_metrics(prediction), **quantile_metrics(prediction, _known(prediction)[0])}
    if isinstance(prediction, ClassPrediction):
        return _classes(prediction, bins, outside or {}, scores, intervals)
    if isinstance(prediction, RegressionPrediction):
        return _values(prediction, intervals)
    raise TypeError(_not_a_prediction(prediction))


def _classes(
    prediction: ClassPrediction,
    bins: int,
    outside: dict[str, ClassPrediction],
    scores: tuple[str, ...],
    intervals: bool,
) -> dict[str, Any]:
    labels, log_likelihood = _known(prediction)
    probs = prediction.probs
    metrics: dict[str, Any] = {
        **quick_metrics(prediction),
        "brier": brier(probs, labels),
        "ece": ece(probs, labels, bins=bins),
        "adaptive_ece": adaptive_ece(probs, labels, bins=bins),
        "classwise_ece": classwise_ece(probs, labels, bins=bins),
        "debiased_ece": debiased_ece(probs, labels, bins=bins),
        "smooth_ece": smooth_ece(probs, labels),
        "misclassification_auroc": misclassification_auroc(probs, labels),
        "aurc": aurc(probs, labels, prediction.total),
        "augrc": augrc(probs, labels, prediction.total),
        "retained_accuracy": {f"{k:g}": v for k, v in retained_accuracy(probs, labels, prediction.total).items()},
        "mean_total": float(prediction.total.mean()),
        "mean_aleatoric": float(prediction.aleatoric.mean()),
        "mean_epistemic": float(prediction.epistemic.mean()),
        "mean_draws": float(prediction.draws_used.float().mean()),
    }
    if prediction.sets is not None:
        metrics["conformal"] = set_metrics(prediction.sets, labels)
    if outside:
        metrics["ood"] = {name: _detection(prediction, other, scores) for name, other in outside.items()}
    if intervals:
        metrics["intervals"] = {
            "accuracy": _bounds(bootstrap(correct(probs, labels).double())),
            "nll": _bounds(bootstrap(-log_likelihood.double())),
            "brier": _bounds(bootstrap(brier_each(probs, labels).double())),
            "ece": _bounds(bootstrap_metric(lambda p, y: ece(p, y, bins=bins), probs, labels, resamples=200)),
        }
    return metrics


def _risk(sets: Tensor | None, targets: Tensor) -> dict[str, Any]:
    return {} if sets is None else {"conformal": risk_metrics(sets, targets)}


def _detection(inside: ClassPrediction, outside: ClassPrediction, scores: tuple[str, ...]) -> dict[str, Any]:
    def score(name: str, prediction: ClassPrediction) -> Tensor:
        if name == "variance":
            return prediction.uncertainty("covariance").epistemic
        return ood_score(name, prediction.probs, epistemic=prediction.epistemic)

    return {name: asdict(ood_detection(score(name, inside), score(name, outside))) for name in scores}


def _values(prediction: RegressionPrediction, intervals: bool) -> dict[str, Any]:
    targets, log_likelihood = _known(prediction)
    mean, quick = prediction.mean, quick_metrics(prediction)
    if "concordance" in quick:  # times, some of which were not observed
        intervals_of = {"nll": _bounds(bootstrap(-log_likelihood.double()))} if intervals else {}
        return {**quick, "mean_draws": float(prediction.draws_used.float().mean()), "intervals": intervals_of}
    metrics: dict[str, Any] = {
        **quick,
        "crps": float(prediction.crps().mean()),
        "interval_coverage": {f"{k:g}": v for k, v in coverage_of(prediction).items()},
        "miscalibration_area": miscalibration_area(prediction.pit()),
        "mean_aleatoric": float(prediction.aleatoric.mean()),
        "mean_epistemic": float(prediction.epistemic.mean()),
        "mean_draws": float(prediction.draws_used.float().mean()),
    }
    if prediction.lower is not None and prediction.upper is not None:
        metrics["conformal"] = interval_metrics(prediction.lower, prediction.upper, targets)
    if intervals:
        error = (mean - targets).double().reshape(len(mean), -1).square().mean(-1).sqrt()
        metrics["intervals"] = {
            "rmse": _bounds(bootstrap(error, statistic="rms")),
            "nll": _bounds(bootstrap(-log_likelihood.double())),
        }
    return metrics


def _known(prediction: Prediction) -> tuple[Tensor, Tensor]:
    if prediction.targets is None or prediction.log_likelihood is None:
        raise ValueError("Metrics need targets: predict from batches of (inputs, targets).")
    lost = int((~prediction.finite).sum())
    if lost:
        raise ValueError(
            f"{lost} of {len(prediction)} rows have no prediction: the network's outputs for them are not finite. "
            "Leave the rows where prediction.finite is False out of the inputs and predict again to measure the others."
        )
    if not bool(torch.isfinite(prediction.log_likelihood).all()):
        blamed = blamed_rows([(None, prediction.targets)])
        raise ValueError(blamed or "The prediction holds NaN or infinite values: the network's outputs are not finite.")
    return prediction.targets, prediction.log_likelihood


def _bounds(interval: Interval) -> list[float]:
    return [interval.low, interval.high]
