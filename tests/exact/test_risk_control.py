"""Conformal risk control of several labels and of pixels: thresholds by brute force, the promise over many splits.

Each promise is tested with a false-alarm rate of 1e-4 at most; all data are seeded.
"""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import credo
from credo.core.held_out.risk_bounds import loss_budget, rows_for
from credo.evaluate import risk_metrics

LEVEL = 1e-4


def label_rows(count: int, labels: int, seed: int) -> tuple[Tensor, Tensor]:
    """Probabilities of labels that are not calibrated, and labels; some rows have none."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, labels, generator=generator) - 0.5
    y = torch.rand(count, labels, generator=generator) < logits.sigmoid()
    return (0.6 * logits + 0.5).sigmoid(), y


def pixel_rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of 4 × 5 pixels of three classes; images differ in difficulty, and a tenth of the pixels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ease = 4 * torch.rand(count, 1, 1, 1, generator=generator)
    logits = ease * torch.randn(count, 4, 5, 3, generator=generator)
    y = torch.multinomial(logits.softmax(-1).view(-1, 3), 1, generator=generator).view(count, 4, 5)
    y[torch.rand(count, 4, 5, generator=generator) < 0.1] = -100
    return (0.7 * logits).softmax(-1), y


def losses(probs: Tensor, true: Tensor, least: float) -> Tensor:
    """The slow way: row by row, label by label."""
    found = []
    for p, t in zip(probs.flatten(1).tolist(), true.flatten(1).tolist(), strict=True):
        own = [value for value, is_true in zip(p, t, strict=True) if is_true]
        if own:
            found.append(sum(value < least for value in own) / len(own))
    return torch.tensor(found, dtype=torch.float64)


def passes(loss: Tensor, alpha: float, confidence: float | None, is_binary: bool) -> bool:
    """The conditions as they are published."""
    n, mean = len(loss), float(loss.mean())
    if confidence is None:
        return n / (n + 1) * mean + 1 / (n + 1) <= alpha + 1e-12
    if is_binary:
        return bool(stats.binom.cdf(round(n * mean), n, alpha) <= 1 - confidence)
    a = min(mean, alpha)
    h = (a * math.log(a / alpha) if a else 0.0) + (1 - a) * math.log((1 - a) / (1 - alpha))
    bentkus = math.e * stats.binom.cdf(math.ceil(n * mean - 1e-9), n, alpha)
    return min(math.exp(-n * h), bentkus) <= 1 - confidence


@pytest.mark.part(5)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("confidence", [None, 0.9])
@pytest.mark.parametrize("classes", [None, 1, [0, 2]])
@pytest.mark.parametrize("what", ["labels", "pixels"])
def test_the_threshold_is_the_largest_that_passes(
    what: str, classes: Any, confidence: float | None, rounded: bool
) -> None:
    """Rounded probabilities have many ties."""
    probs, y = label_rows(60, 4, 0) if what == "labels" else pixel_rows(60, 0)
    probs = (10 * probs).round() / 10 if rounded else probs
    found = credo.conformal(probs, y, 0.2, "fnr", confidence=confidence, classes=classes)
    assert isinstance(found, credo.RiskControlledSets)
    true = y if what == "labels" else torch.stack([y == k for k in range(3)], -1)
    kept = torch.zeros(true.shape[-1], dtype=torch.bool)
    kept[classes if classes is not None else slice(None)] = True
    true = true & kept
    is_binary = what == "labels" and classes == 1
    possible = [0.0, *sorted(set(probs.double().flatten().tolist()))]
    good = [t for t in possible if passes(losses(probs.double(), true, t), 0.2, confidence, is_binary)]
    assert found.thresholds == (max(good),)
    assert found.rows == (int(true.flatten(1).any(1).sum()),)
    sets = found.sets(probs)
    assert torch.equal(sets, (probs >= max(good)) & kept)
    wanted = float(losses(probs.double(), true, max(good)).mean())
    if classes is None:
        assert risk_metrics(sets, y)["fnr"] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.part(4)
@pytest.mark.parametrize("rows", [1, 7, 30, 200])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
@pytest.mark.parametrize("is_binary", [False, True])
def test_budgets_are_the_largest_that_the_bounds_allow(rows: int, alpha: float, is_binary: bool) -> None:
    found = loss_budget(rows, alpha, 0.9, is_binary=is_binary)

    def is_small(total: float) -> bool:
        return passes(torch.full((rows,), total / rows, dtype=torch.float64), alpha, 0.9, is_binary)

    steps = range(rows + 1) if is_binary else [i * rows / 4000 for i in range(4001)]
    good = [total for total in steps if is_small(total)]
    assert (found < 0) == (not good)
    assert not good or max(good) <= found + 1e-9 < max(good) + (1 if is_binary else rows / 4000) + 1e-6
    assert (rows >= rows_for(alpha, 0.9)) == bool(good)


def rates_of(what: str, probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean rate over a large pool of new rows as a function: ordered probabilities and the losses above each."""
    true = y if what == "labels" else torch.stack([y == k for k in range(3)], -1)
    count = true.flatten(1).sum(1)
    own, row = probs.double()[true], true.nonzero()[:, 0]
    ordered, order = own.sort()
    weights = (1.0 / count.double())[row[order]] / int((count > 0).sum())
    return ordered, torch.nn.functional.pad(weights.cumsum(0), (1, 0))


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["labels", "pixels"])
def test_the_promise_holds_over_2000_splits(what: str) -> None:
    """On average the rate is α or less, by 2/(n + 1) at most; with confidence 0.9, few splits exceed it."""
    splits, rows, alpha = 2000, 50, 0.2
    make = (lambda n, seed: label_rows(n, 4, seed)) if what == "labels" else pixel_rows
    probs, y = make(splits * rows, 1)
    ordered, lost = rates_of(what, *make(40_000, 2))
    means, exceeded, sure = [], 0, []
    for split in range(splits):
        part = slice(split * rows, (split + 1) * rows)
        for confidence in (None, 0.9):
            found = credo.conformal(probs[part], y[part], alpha, "fnr", confidence=confidence)
            rate = float(lost[torch.searchsorted(ordered, torch.tensor(found.thresholds[0], dtype=torch.float64))])
            (means if confidence is None else sure).append(rate)
    mean = torch.tensor(means, dtype=torch.float64)
    error = float(mean.std()) / math.sqrt(splits)
    z = stats.norm.ppf(1 - LEVEL / 2)
    assert alpha - 2 / (0.9 * rows + 1) - z * error < float(mean.mean()) < alpha + z * error
    exceeded = sum(rate > alpha for rate in sure)
    assert exceeded <= stats.binom.ppf(1 - LEVEL, splits, 0.1)
    assert sum(sure) / splits > 0.4 * alpha  # it is of use


def test_each_label_by_itself_is_the_exact_binomial_limit() -> None:
    probs, y = label_rows(80, 3, 3)
    found = credo.conformal(probs, y, 0.2, "fnr", confidence=0.9, by_class=True)
    for label in range(3):
        one = credo.conformal(probs, y, 0.2, "fnr", confidence=0.9, classes=label)
        assert (found.thresholds[label], found.rows[label]) == (one.thresholds[0], one.rows[0])
        assert torch.equal(found.sets(probs)[:, label], one.sets(probs)[:, label])  # type: ignore[union-attr]


def test_rows_without_a_true_label_do_not_count() -> None:
    probs, y = label_rows(100, 3, 4)
    empty = torch.cat([y, torch.zeros(50, 3, dtype=torch.bool)])
    more = torch.cat([probs, torch.rand(50, 3, generator=torch.Generator().manual_seed(0))])
    assert credo.conformal(more, empty, 0.1, "fnr") == credo.conformal(probs, y, 0.1, "fnr")
    with pytest.warns(credo.FewRowsWarning, match=r"0 calibration rows with a true label are too few .* needs 9"):
        none = credo.conformal(probs, torch.zeros_like(y), 0.1, "fnr")
    assert none.sets(probs).all()  # type: ignore[union-attr]
    assert risk_metrics(none.sets(probs), torch.zeros_like(y))["fnr"] is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("probs", "y", "options", "message"),
    [
        (torch.rand(5, 3), torch.zeros(5, dtype=torch.long), {}, "use kind='lac'"),
        (torch.rand(5, 3), torch.full((5, 3), 2), {}, "0 or 1"),
        (torch.rand(5, 3) + 1, torch.ones(5, 3), {}, "between 0 and 1"),
        (torch.rand(5, 2, 3), torch.full((5, 2), 255), {}, "give ignore_index=255"),
        (torch.rand(5, 2, 3), torch.zeros(5, 2, dtype=torch.long), {"classes": 3}, "indices from 0 to 2"),
        (torch.rand(5, 3), torch.ones(5, 3), {"confidence": 1.5}, "confidence=1.5 must lie between 0 and 1"),
        (torch.rand(5, 2, 3), torch.zeros(5, 2, dtype=torch.long), {"ignore_index": "a"}, "ignore_index='a'"),
    ],
)
def test_what_does_not_fit_is_named(probs: Tensor, y: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.conformal(probs, y, 0.1, "fnr", **options)


def test_options_of_risk_control_are_for_it_alone() -> None:
    with pytest.raises(ValueError, match="are for kind='fnr'"):
        credo.conformal(torch.full((20, 2), 0.5), torch.zeros(20, dtype=torch.long), confidence=0.9)
