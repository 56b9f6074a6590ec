"""Coverage over 2,000 calibration sets is distributed as Beta(n + 1 − l, l), for every kind of set and interval.

Each distribution is compared by a Kolmogorov-Smirnov test at level 1e-4, with about 20 of them: all data are seeded,
and another seed would fail here with a chance of 1 in 500.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import credo
from credo.core.held_out.conformal_scores import quantile_scores, rank_of, residual_scores
from credo.evaluate import risk_control

SPLITS, ROWS, POOL = 2000, 39, 50_000
LEVEL = 1e-4


def class_rows(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Probabilities of a network that is right more often than it says, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, classes, generator=generator)
    y = torch.multinomial((1.4 * logits).softmax(-1), 1, generator=generator).squeeze(1)
    return logits.softmax(-1), y


def value_rows(count: int, outputs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means, standard deviations that are too small, and targets."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, outputs, generator=generator)
    std = 0.1 + torch.rand(count, outputs, generator=generator)
    return mean, std, mean + 1.5 * std * torch.randn(count, outputs, generator=generator)


def coverages(scores: Tensor, pool: Tensor, alpha: float) -> Tensor:
    """Of each split, with its own threshold, on new rows."""
    rank = rank_of(alpha, scores.shape[1])
    thresholds = scores.sort(1).values[:, rank - 1].contiguous()
    return torch.searchsorted(pool.sort().values, thresholds, right=True).double() / len(pool)


def check_beta(found: Tensor, rows: int, alpha: float) -> None:
    rank = rank_of(alpha, rows)
    assert stats.kstest(found.numpy(), stats.beta(rank, rows + 1 - rank).cdf).pvalue > LEVEL
    expected = credo.ConformalIntervals("split", alpha, (1.0,), (rows,)).coverage
    assert abs(float(((found >= expected.low) & (found <= expected.high)).double().mean()) - 0.95) < 0.02


def own(found: credo.ConformalSets, probs: Tensor, y: Tensor) -> Tensor:
    return found.scores(probs).gather(1, y[:, None]).squeeze(1)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
def test_sets_cover_as_the_beta_distribution_says(kind: str, classes: int) -> None:
    probs, y = class_rows(SPLITS * ROWS, classes, 0)
    new, new_y = class_rows(POOL, classes, 1)
    fixed: dict[str, Any] = {"penalty": 0.1, "k_reg": 1} if kind == "raps" else {}
    first = credo.conformal(probs[:ROWS], y[:ROWS], 0.1, kind, allow_empty=True, **fixed)
    assert isinstance(first, credo.ConformalSets)
    scores = own(first, probs, y).view(SPLITS, ROWS)
    found = coverages(scores, own(first, new, new_y), 0.1)
    check_beta(found, ROWS, 0.1)
    # The first splits through the public functions, sets and all.
    for split in range(5):
        part = slice(split * ROWS, (split + 1) * ROWS)
        again = credo.conformal(probs[part], y[part], 0.1, kind, allow_empty=True, **fixed)
        assert isinstance(again, credo.ConformalSets)
        covered = again.sets(new).gather(1, new_y[:, None])
        assert float(covered.double().mean()) == pytest.approx(float(found[split]), abs=1e-12)


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("by_class", [False, True])
def test_coverage_is_exact_where_a_part_of_the_rows_chose_the_penalty(by_class: bool) -> None:
    """600 splits of 150 rows, each with a penalty of its own; thresholds of rows that chose it would be too low."""
    rows, alpha, splits = 150, 0.2, 600

    def flat(count: int, seed: int) -> tuple[Tensor, Tensor]:
        """A network that is mostly right and never sure: the sets of APS are too large, and a penalty may pay."""
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(count, 5, generator=generator)
        return (0.4 * logits).softmax(-1), torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)

    probs, y = flat(splits * rows, 12)
    new, new_y = flat(20_000, 13)
    found, kept, penalties = [], set(), set()
    for split in range(splits):
        part = slice(split * rows, (split + 1) * rows)
        sets = credo.conformal(probs[part], y[part], alpha, "raps", allow_empty=True, by_class=by_class)
        assert isinstance(sets, credo.ConformalSets)
        assert sets.chosen_on > 0
        assert sum(sets.rows) == rows - sets.chosen_on
        penalties.add((sets.penalty, sets.k_reg))
        kept.add(sets.rows[0])
        inside = new_y == 0 if by_class else torch.ones(len(new), dtype=torch.bool)
        scores = own(sets, new[inside], new_y[inside])
        found.append(float((scores <= sets.thresholds[0]).double().mean()))
    assert len(penalties) > 3
    if by_class:  # numbers of rows differ: the mean coverage, within five of its standard errors
        mean = torch.tensor(found)
        assert float(mean.mean()) > 1 - alpha - 5 * float(mean.std()) / splits**0.5
    else:
        check_beta(torch.tensor(found), kept.pop(), alpha)


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
def test_classes_are_covered_each_by_itself(kind: str) -> None:
    probs, y = class_rows(SPLITS * ROWS * 4, 3, 2)
    new, new_y = class_rows(POOL, 3, 3)
    fixed: dict[str, Any] = {"penalty": 0.1, "k_reg": 1} if kind == "raps" else {}
    shape = credo.conformal(probs[:200], y[:200], 0.1, kind, by_class=True, **fixed)
    assert isinstance(shape, credo.ConformalSets)
    for label in range(3):
        scores = own(shape, probs, y)[y == label][: SPLITS * ROWS].view(SPLITS, ROWS)
        check_beta(coverages(scores, own(shape, new, new_y)[new_y == label], 0.1), ROWS, 0.1)
        one = own(shape, probs[:200], y[:200])[y[:200] == label].sort().values
        assert shape.thresholds[label] == float(one[rank_of(0.1, len(one)) - 1])
        assert shape.rows[label] == len(one)


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
@pytest.mark.parametrize("rule", ["ties", "non-empty", "not randomised"])
def test_ties_and_non_empty_sets_cover_at_least_as_much(kind: str, rule: str) -> None:
    probs, y = class_rows(150 * ROWS, 4, 4)
    new, new_y = class_rows(2000, 4, 5)
    options: dict[str, Any] = {"allow_empty": rule != "non-empty", "randomised": rule != "not randomised"}
    options |= {"penalty": 0.1, "k_reg": 1} if kind == "raps" else {}
    if rule == "ties":  # few different probabilities, equal ones within a row among them
        probs, new = ((part * 4).round().clamp_min(0.25) for part in (probs, new))
        probs, new = probs / probs.sum(1, keepdim=True), new / new.sum(1, keepdim=True)
    found = []
    for split in range(150):
        part = slice(split * ROWS, (split + 1) * ROWS)
        sets = credo.conformal(probs[part], y[part], 0.4, kind, **options).sets(new)  # type: ignore[union-attr]
        found.append(float(sets.gather(1, new_y[:, None]).double().mean()))
    # Five standard errors of the mean coverage below 1 − alpha.
    assert sum(found) / 150 > 0.6 - 5 * (0.6 * 0.4 / ROWS / 150) ** 0.5


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kind", ["split", "normalised", "cqr"])
def test_intervals_cover_all_outputs_together(kind: str, outputs: int) -> None:
    def rows(count: int, seed: int) -> tuple[Any, Tensor, Tensor]:
        mean, std, y = value_rows(count, outputs, seed)
        given: dict[str, Any] = {"split": mean, "normalised": (mean, std), "cqr": (mean - std, mean + 2 * std)}
        score: dict[str, Callable[[], Tensor]] = {
            "split": lambda: residual_scores(y, mean),
            "normalised": lambda: residual_scores(y, mean, std),
            "cqr": lambda: quantile_scores(y, mean - std, mean + 2 * std),
        }
        return given[kind], y, score[kind]()

    _, _, scores = rows(SPLITS * ROWS, 6)
    new, new_y, pool = rows(POOL, 7)
    check_beta(coverages(scores.view(SPLITS, ROWS), pool, 0.2), ROWS, 0.2)
    given, y, _ = rows(ROWS, 8)
    found = credo.conformal(given, y, 0.2, kind)
    assert isinstance(found, credo.ConformalIntervals)
    lower, upper = found.intervals(new)
    inside = ((lower <= new_y) & (new_y <= upper)).all(1)
    assert float(inside.double().mean()) == pytest.approx(
        float((pool <= found.thresholds[0]).double().mean()), abs=1e-4
    )


def test_accepted_answers_are_wrong_at_most_as_often_as_stated() -> None:
    """Where the threshold that is chosen exceeds the error rate, which may happen to 10 % of the calibration sets."""
    probs, y = class_rows(200 * 400, 4, 10)
    new, new_y = class_rows(20_000, 4, 11)
    unsure, wrong = 1 - new.amax(1), new.argmax(1) != new_y
    exceeded, accepted = 0, 0
    for split in range(200):
        part = slice(split * 400, (split + 1) * 400)
        found = risk_control(probs[part], y[part], 1 - probs[part].amax(1), max_error=0.2, confidence=0.9, thresholds=5)
        taken = found.accepts(unsure)
        accepted += bool(taken.any())
        exceeded += bool(taken.any()) and float(wrong[taken].double().mean()) > 0.2
    assert accepted > 150  # it is of use
    assert exceeded <= stats.binom.ppf(1 - LEVEL, 200, 0.1)
