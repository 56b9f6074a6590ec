"""The numbers of a report: those of `measure`, their intervals, and differences between runs."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credo.evaluate import Interval, bootstrap, ece, nll_each, paired_difference, rmse
from credo.experiments.runs import Run, evaluate_run
from credo.report import Content, gather, render
from credo.report.compare import best_of, further_intervals, judged
from credo.report.tables import differences_of, runs_table

OOD = "photo-patches"


@pytest.fixture(scope="module")
def digits(digits_runs: list[Path]) -> Content:
    return gather(digits_runs, ood=[OOD], draws=8, doctor=False)


@pytest.fixture(scope="module")
def gap(gap_runs: list[Path]) -> Content:
    return gather(gap_runs, draws=8, doctor=False)


def shown(tree: Any, table: str) -> dict[str, dict[str, float]]:
    """Every number of a table, unrounded, by run and key."""
    rows = tree.all("table", class_=table)[0].all("tr")
    return {
        row.attributes["data-run"]: {
            cell.attributes["data-key"]: float(cell.all("data")[0].attributes["value"]) for cell in row.all("td")
        }
        for row in rows
        if "data-run" in row.attributes
    }


def test_the_table_holds_the_numbers_of_measure(digits: Content, digits_runs: list[Path], parsed: Callable) -> None:
    found = shown(parsed(render(digits)), "cards")
    assert list(found) == ["map", "bbb"]
    for folder in digits_runs:
        numbers, expected = found[folder.name], evaluate_run(Run(folder), draws=8, ood=(OOD,))
        for key in ("accuracy", "nll", "ece", "brier"):
            assert numbers[key] == expected[key]
        assert numbers[f"ood {OOD}"] == expected["ood"][OOD]["entropy"]["auroc"]
        result = Run(folder).result()
        assert numbers["parameters"] == result["parameters"]["needed"]
        assert numbers["seconds"] == result["seconds"]


def test_what_is_written_is_the_number_rounded(digits: Content, parsed: Callable) -> None:
    row = parsed(render(digits)).all("tr", data_run="bbb")[0]
    accuracy, nll = row.all("td", data_key="accuracy")[0], row.all("td", data_key="nll")[0]
    metrics = digits.runs[1].metrics
    assert accuracy.all("data")[0].text == f"{100 * metrics['accuracy']:.1f} %"  # split() has made spaces plain
    assert nll.all("data")[0].text == f"{metrics['nll']:.3f}"
    low, high = metrics["intervals"]["nll"]
    assert nll.all("small")[0].text == f"{low:.3f} to {high:.3f}"
    low, high = metrics["intervals"]["accuracy"]
    assert accuracy.all("small")[0].text == f"{100 * low:.1f} to {100 * high:.1f}"


def test_the_best_of_each_column_is_marked(digits: Content, parsed: Callable) -> None:
    tree = parsed(render(digits))
    found = shown(tree, "cards")
    signs = {"accuracy": 1, f"ood {OOD}": 1}
    for key in found["map"]:
        numbers = {name: signs.get(key, -1) * values[key] for name, values in found.items()}
        if key in ("parameters", "seconds"):
            continue
        best = {name for name, number in numbers.items() if number == max(numbers.values())}
        cells = {row.attributes.get("data-run"): row.all("td", data_key=key) for row in tree.all("table")[0].all("tr")}
        marked = {name for name, cell in cells.items() if cell and cell[0].all("span", class_="star")}
        assert marked == (best if len(set(numbers.values())) > 1 else set())


def test_cheap_and_clearly_worse_is_not_best(digits: Content, parsed: Callable) -> None:
    plain = digits.runs[0]
    probs = torch.full_like(plain.prediction.probs, 0.1)
    nll = torch.full_like(plain.prediction.log_likelihood, math.log(0.1))
    useless = replace(plain.prediction, probs=probs, log_likelihood=nll)
    costs = {"parameters": {"needed": 1, "network": 1}, "seconds": 1e-3}
    runs = [
        plain,
        replace(plain, name="dear", result={"parameters": {"needed": 10**9}, "seconds": 1e9}),
        replace(plain, name="bad", result=costs, prediction=useless, metrics={**plain.metrics, "nll": math.log(10)}),
    ]
    marks = {row.run.name: [cell.best for cell in row.cells[-2:]] for row in runs_table(replace(digits, runs=runs))}
    assert marks == {plain.name: [True, True], "dear": [False, False], "bad": [False, False]}


@pytest.mark.parametrize(
    ("values", "better", "best"),
    [
        ([1.0, 3.0, 2.0], "high", {1}),
        ([1.0, 3.0, 2.0], "low", {0}),
        ([2.0, 1.0, 1.0], "low", {1, 2}),
        ([1.0, 1.0], "low", set()),
        ([1.0], "high", set()),
        ([math.nan, 2.0, None, 1.0], "high", {1}),
        ([math.nan, None], "low", set()),
    ],
)
def test_best_of(values: list[float | None], better: str, best: set[int]) -> None:
    assert best_of(values, better) == best


def test_interval_of_detection(digits: Content) -> None:
    """Against a bootstrap of another library's random numbers, on its own pairs; both err by about 0.003."""
    run = digits.runs[1]
    inside, outside = run.prediction.total.numpy(), run.ood[OOD].total.numpy()
    generator = np.random.default_rng(0)
    results = []
    for _ in range(300):
        a, b = (generator.choice(scores, len(scores)) for scores in (inside, outside))
        results.append((b[:, None] > a).mean() + 0.5 * (b[:, None] == a).mean())
    low, high = run.intervals[f"ood {OOD}"]
    assert low == pytest.approx(np.quantile(results, 0.025), abs=0.012)
    assert high == pytest.approx(np.quantile(results, 0.975), abs=0.012)


def test_interval_of_the_crps(gap: Content) -> None:
    for run in gap.runs:
        p = run.prediction
        assert further_intervals(p, {}).keys() == {"crps"}
        low, high = run.intervals["crps"]
        assert low < run.metrics["crps"] < high
        # CRPS of a Gaussian, written out (Gneiting and Raftery 2007).
        z = ((p.targets - p.mean) / p.total).double()
        normal = torch.distributions.Normal(0.0, 1.0)
        density = normal.log_prob(z).exp()
        each = p.total * (z * (2 * normal.cdf(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
        expected = bootstrap(each[:, 0].double())
        assert [low, high] == pytest.approx([expected.low, expected.high], rel=1e-5)


def test_differences_of_means_are_paired(digits: Content) -> None:
    first, second = (run.prediction for run in digits.runs)
    expected = paired_difference(nll_each(second.probs, second.targets), nll_each(first.probs, first.targets))
    found = digits.runs[1].differences["nll"]
    assert [found.value, found.low, found.high] == pytest.approx(
        [expected.value, expected.low, expected.high], abs=1e-5
    )
    assert found.p_value == pytest.approx(expected.p_value, abs=0.01)
    assert digits.runs[0].differences == {}


@pytest.mark.parametrize("key", ["accuracy", "nll", "ece", "brier", f"ood {OOD}"])
def test_a_difference_is_that_of_the_table(digits: Content, key: str, parsed: Callable) -> None:
    tree = parsed(render(digits))
    numbers, differences = shown(tree, "cards"), shown(tree, "differences")
    assert differences["bbb"][key] == pytest.approx(numbers["bbb"][key] - numbers["map"][key], abs=1e-6)
    found = digits.runs[1].differences[key]
    assert found.low <= found.value <= found.high or key == "ece"  # biased: its interval may miss it
    assert (found.p_value is None) == (key == "ece" or key.startswith("ood"))


def test_the_interval_of_a_calibration_difference_resamples_both_runs_alike(digits: Content) -> None:
    first, second = (run.prediction for run in digits.runs)
    generator = torch.Generator().manual_seed(5)
    results = []
    for _ in range(200):
        rows = torch.randint(len(first), (len(first),), generator=generator)
        a, b = (ece(p.probs[rows], p.targets[rows]) for p in (second, first))
        results.append(a - b)
    ends = torch.tensor(results).quantile(torch.tensor([0.025, 0.975])).tolist()
    found = digits.runs[1].differences["ece"]
    # Ends of 200 resamples have a standard error of about a seventh of the interval's width.
    assert [found.low, found.high] == pytest.approx(ends, abs=0.4 * (ends[1] - ends[0]))


def test_differences_of_regressions(gap: Content) -> None:
    first, second = (run.prediction for run in gap.runs)
    found = gap.runs[1].differences
    assert set(found) == {"rmse", "nll", "crps"}
    value = rmse(second.mean, second.targets) - rmse(first.mean, first.targets)
    # Both are rounded before they are subtracted, and differ little.
    assert found["rmse"].value == pytest.approx(value, abs=1e-7)
    squares = [(p.mean - p.targets).double().square()[:, 0] for p in (second, first)]
    assert found["rmse"].p_value == paired_difference(*squares).p_value
    assert found["crps"].value == pytest.approx(gap.runs[1].metrics["crps"] - gap.runs[0].metrics["crps"], abs=1e-6)


@pytest.mark.parametrize(
    ("found", "better", "verdict"),
    [
        (Interval(0.2, 0.1, 0.3, 0.001), "high", "better"),
        (Interval(0.2, 0.1, 0.3, 0.001), "low", "worse"),
        (Interval(-0.2, -0.3, -0.1, 0.001), "low", "better"),
        (Interval(-0.2, -0.3, -0.1), "high", "worse"),
        (Interval(0.2, -0.1, 0.3, 0.001), "high", "unclear"),
        (Interval(0.2, 0.1, 0.3, 0.05), "high", "unclear"),
        (Interval(0.0, 0.0, 0.0, 1.0), "high", "unclear"),
        (Interval(math.nan, math.nan, math.nan), "high", "unclear"),
    ],
)
def test_a_difference_is_judged(found: Interval, better: str, verdict: str) -> None:
    assert judged(found, better) == verdict


def test_verdicts_are_in_the_table_and_in_words(digits: Content, parsed: Callable) -> None:
    tree = parsed(render(digits))
    (differences,) = differences_of(digits).values()
    cells = tree.all("table", class_="differences")[0].all("tr", data_run="bbb")[0].all("td")
    verdicts = [difference.verdict for difference in differences]
    assert [cell.attributes["class"].split()[-1] for cell in cells] == verdicts
    (line,) = tree.all("ul", class_="summary")[0].all("li")
    assert ("better" in line.text) == ("better" in verdicts)
    assert ("worse" in line.text) == ("worse" in verdicts)
    assert ("no significant difference" in line.text) == ("unclear" in verdicts)
