from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

# `credo.evaluate` as an attribute is the function of that name, which hides the package from an import statement.
evaluate = import_module("credo.evaluate")

METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "accuracy": evaluate.accuracy,
    "nll": evaluate.nll,
    "brier": evaluate.brier,
    "correct": evaluate.correct,
    "nll_each": evaluate.nll_each,
    "brier_each": evaluate.brier_each,
    "reliability": evaluate.reliability,
    "ece": evaluate.ece,
    "adaptive_ece": evaluate.adaptive_ece,
    "classwise_ece": evaluate.classwise_ece,
    "maximum_calibration_error": evaluate.maximum_calibration_error,
    "misclassification_auroc": evaluate.misclassification_auroc,
    "retained_accuracy": lambda p, y: evaluate.retained_accuracy(p, y, torch.zeros(len(p))),
    "risk_coverage": lambda p, y: evaluate.risk_coverage(p, y, torch.zeros(len(p))),
    "aurc": lambda p, y: evaluate.aurc(p, y, torch.zeros(len(p))),
    "excess_aurc": lambda p, y: evaluate.excess_aurc(p, y, torch.zeros(len(p))),
}

PROBS = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
LABELS = torch.tensor([1, 0, 1])


@pytest.fixture(params=METRICS, ids=list(METRICS))
def metric(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Any]:
    return METRICS[request.param]


def test_every_metric_accepts_the_good_input_that_the_bad_ones_below_are_made_from(metric):
    metric(PROBS, LABELS)


@pytest.mark.parametrize(
    "logits",
    [
        torch.tensor([[2.0, -1.0], [0.0, 1.0], [0.5, 0.5]]),  # outside [0, 1], rows sum to one
        torch.tensor([[0.2, 0.7], [0.5, 0.5], [0.5, 0.5]]),  # inside [0, 1], one row does not sum to one
        torch.tensor([[torch.inf, -torch.inf], [0.5, 0.5], [0.5, 0.5]]),
        PROBS.log(),
    ],
    ids=["range", "sum", "infinite", "log-probs"],
)
def test_logits_are_refused(metric, logits):
    with pytest.raises(ValueError, match="these look like logits; pass probabilities"):
        metric(logits, LABELS)


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (PROBS[:0], LABELS[:0], "empty"),
        (PROBS.where(PROBS != 0.6, torch.nan), LABELS, "NaN"),
        (PROBS[0], LABELS, "shape"),
        (PROBS[:, :1], LABELS, "one column"),
        (PROBS.half(), LABELS, "dtype"),
        (PROBS, LABELS[:2], "shape"),
        (PROBS, LABELS[:, None], "shape"),
        (PROBS, LABELS.float(), "integer class indices"),
        (PROBS, LABELS.bool(), "integer class indices"),
        (PROBS, LABELS + 1, "labels run from 1 to 2"),
        (PROBS, LABELS - 1, "labels run from -1 to 0"),
    ],
)
def test_bad_input_is_refused_with_the_reason(metric, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probs, labels)


def test_sums_may_be_off_by_less_than_the_tolerance():
    probs = torch.tensor([[0.5, 0.4992]])
    assert evaluate.accuracy(probs, torch.tensor([0])) == 1
    with pytest.raises(ValueError, match="pass probabilities"):
        evaluate.accuracy(probs - 0.0002, torch.tensor([0]))


def test_rounding_errors_outside_the_unit_interval_are_clamped():
    probs = torch.tensor([[1.0000002, -0.0000001]])
    assert evaluate.nll(probs, torch.tensor([0])) == 0
    assert evaluate.brier(probs, torch.tensor([0])) == 0
    assert evaluate.reliability(probs, torch.tensor([0])).count[-1] == 1


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_any_integer_labels_work(metric, kind):
    small, whole = metric(PROBS, LABELS.to(kind)), metric(PROBS, LABELS)
    torch.testing.assert_close(_tensors(small), _tensors(whole), rtol=0, atol=0, equal_nan=True)


def test_probabilities_with_a_graph_are_not_held(metric):
    leaf = PROBS.clone().requires_grad_()
    assert not any(t.requires_grad for t in _tensors(metric(leaf, LABELS)))


def test_a_metric_leaves_its_input_alone(metric):
    probs, labels = PROBS.clone(), LABELS.clone()
    metric(probs, labels)
    assert torch.equal(probs, PROBS)
    assert torch.equal(labels, LABELS)


def test_exports_match_the_list():
    public = {n for n in vars(evaluate) if not n.startswith("_")}
    assert set(evaluate.__all__) <= public
    assert len(set(evaluate.__all__)) == len(evaluate.__all__)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, dict):
        return [torch.tensor(v) for v in result.values()]
    if isinstance(result, tuple):
        return list(result)
    if isinstance(result, evaluate.Reliability):
        return list(vars(result).values())
    return [torch.as_tensor(result)]
