"""The cost of predicting with S draws, relative to S forward passes of the deterministic network."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.latency import CASE as ONE_INPUT
from benchmarks.latency import latency_table, measure_latency, shown
from benchmarks.networks import CLASSES, DATA_SIZE, random_inputs
from benchmarks.peers import PEERS
from benchmarks.report import MISSING, Run, as_result, milliseconds, names_of, parser_for, progress, say, table
from benchmarks.timing import Work, interleave, ratio
from benchmarks.trained import compare, digits, quality, train_on
from credo import BBB, predict
from credo.data import Split
from credo.models import build_model
from credo.predict.run import STRATEGIES
from reproductions.quiet import timing

_EPILOG = """\
Reading the tables
  Before them, case one-input: the latency of a single input, by milliseconds and in forward passes, of credo.predict
  and credo.predictor, beside torch.func.vmap over draws that are stored already.
  First: time of one prediction with S draws divided by that of S passes of the deterministic network on the same
  batch in the same round; the median over rounds, then the range of the middle 80 %. Rows "bbb ..." are
  credo.predict with that strategy on a BBB posterior ("auto" is the default), "bbb adaptive" stops drawing for an
  input when the standard error of its probabilities is below the tolerance, the peers run their plain loops. "–": not
  possible there.
  Second: what adaptive prediction gives for its time. ± is the standard deviation over predictions with other
  draws: the Monte-Carlo error of one prediction. The difference is between the means, ± its standard error.

Cases (network, inputs, S)
  one-input                                     an untrained conv net, one input, S = 1, 8, 32
  mlp-2000, mlp-200, lenet5-250, resnet20-64    untrained, on random data
  digits, digits28                              an MLP trained on scikit-learn's digits, 8x8 or enlarged to 28x28;
                                                timed on held-out digits repeated to 2000 inputs

Examples
  python -m benchmarks.predict_cost --cases mlp-2000,digits --peers none
  python -m benchmarks.predict_cost --json results/benchmarks/predict_cost.json
  python -m benchmarks.predict_cost --cases one-input --threads 1 --json results/benchmarks/latency.json
  python -m benchmarks.predict_cost --quick

Run it on a machine that does nothing else; see docs/benchmarks.md.
"""
REFERENCE = "S forward passes"
FULL = "bbb auto"
ADAPTIVE = "bbb adaptive"
_QUALITY = ("accuracy", "NLL", "draws", "time")
_ROUNDS = 10


@dataclass(frozen=True)
class Case:
    """A network, how many inputs of what shape it predicts at once, with how many draws; trained on digits or not."""

    model: str
    shape: tuple[int, ...]
    inputs: int
    draws: int
    trained: bool = False


CASES = {
    "mlp-2000": Case("mlp", (1, 28, 28), 2000, 100),
    "mlp-200": Case("mlp", (1, 28, 28), 200, 100),
    "lenet5-250": Case("lenet5", (3, 32, 32), 250, 100),
    "resnet20-64": Case("resnet20", (3, 32, 32), 64, 10),
    "digits": Case("mlp", (1, 8, 8), 2000, 100, trained=True),
    "digits28": Case("mlp", (1, 28, 28), 2000, 100, trained=True),
}


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of timing, epochs of training, predictions for the Monte-Carlo error."""

    rounds: int
    tolerance: float
    epochs: int = 30
    repeats: int = 20


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an unknown name is an error that suggests the nearest one."""
    parser = parser_for("predict_cost", what=__doc__ or "", epilog=_EPILOG)
    parser.add_argument(
        "--cases",
        type=names_of("case", [ONE_INPUT, *CASES]),
        metavar="NAMES",
        help=f"some of {', '.join([ONE_INPUT, *CASES])} (default: all; one-input, mlp-200 and digits with --quick)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        metavar="T",
        help="largest standard error of a class probability that adaptive prediction accepts (default: 0.01)",
    )
    options = parser.parse_args(argv)
    if not options.tolerance > 0:
        parser.error(f"argument --tolerance: {options.tolerance} is not positive")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = arguments(argv)
    names = options.cases or [ONE_INPUT, *(["mlp-200", "digits"] if options.quick else CASES)]
    cases = {name: CASES[name] for name in names if name != ONE_INPUT}
    effort = Effort(options.rounds or _ROUNDS, options.tolerance)
    if options.quick:
        cases = {name: replace(c, inputs=min(100, c.inputs), draws=min(30, c.draws)) for name, c in cases.items()}
        effort = Effort(options.rounds or 2, options.tolerance, epochs=2, repeats=2)
    config = {
        "cases": {name: asdict(case) for name, case in cases.items()},
        "peers": options.peers,
        "quick": options.quick,
        **asdict(effort),
    }
    run = Run("predict_cost", config, options.threads)
    with timing(quick=options.quick):
        rounds = options.rounds or (2 if options.quick else 30)
        latency = measure_latency(rounds) if ONE_INPUT in names else {}
        numbers = {}
        for name, case in cases.items():
            numbers[name] = measure(name, case, options.peers, effort)
            run.keep(numbers, options.json, result_tables(numbers))
    made = {"latency": latency_table(latency)} if latency else {}
    made |= result_tables(numbers) if numbers else {}
    if latency:
        print(shown(made["latency"]))
    if numbers:
        print(tables(numbers))
    run.finish({**numbers, **({"latency": latency} if latency else {})}, options.json, tables=made)


def measure(name: str, case: Case, peers: Sequence[str], effort: Effort) -> dict[str, Any]:
    """Time every contender in one case; with a trained network also compare adaptive with full prediction."""
    posterior, x, held_out = prepared(name, case, effort)
    posterior.eval()
    work: dict[str, Work] = {}
    rows: dict[str, dict[str, Any]] = {}
    makers = contenders(case, posterior, x, peers, effort)
    for row, make in makers.items():
        try:
            candidate = make()
            candidate()  # warm-up
            work[row] = candidate
        except Exception as error:
            # What cannot be done here is a result for a peer or for a strategy; anything else of ours is a bug.
            if row not in PEERS and not isinstance(error, ValueError):
                raise
            rows[row] = {"missing": f"fails: {error}" if row in PEERS else str(error)}
    rows |= {peer: {"missing": MISSING} for peer in peers if peer not in work and peer not in rows}
    with progress(f"{name}: {len(work)} contenders", effort.rounds) as advance:
        seconds = interleave(work, rounds=effort.rounds, on_round=advance)
    for row, taken in seconds.items():
        rows[row] = asdict(ratio(taken, seconds[REFERENCE])) | {"milliseconds": 1000 * median(taken)}
    rows = {row: rows[row] for row in (*makers, *peers) if row in rows}
    if held_out is None:
        return {"time": rows}
    return {"time": rows, "quality": compared(posterior, held_out, case, effort)}


def compared(posterior: BBB, held_out: Split, case: Case, effort: Effort) -> dict[str, dict[str, float]]:
    """Quality of the full and of the adaptive prediction."""
    first, second = range(effort.repeats), range(effort.repeats, 2 * effort.repeats)  # no draw in common
    full = quality(posterior, held_out, draws=case.draws, tolerance=None, seeds=first)
    adaptive = quality(posterior, held_out, draws=case.draws, tolerance=effort.tolerance, seeds=second)
    difference = compare(adaptive, full, repeats=effort.repeats)
    return {FULL: asdict(full), ADAPTIVE: asdict(adaptive), "difference": asdict(difference)}


def prepared(name: str, case: Case, effort: Effort) -> tuple[BBB, Tensor, Split | None]:
    """The posterior, the inputs to time it on, and held-out data where it is a trained one."""
    if not case.trained:
        net = build_model(case.model, inputs=case.shape, classes=CLASSES, seed=0)
        return BBB(net, data_size=DATA_SIZE), random_inputs(case.shape, case.inputs), None
    say(f"{name}: training for {effort.epochs} epochs")
    train, test = digits(case.shape)
    repeats = -(-case.inputs // len(test))
    return train_on(train, epochs=effort.epochs), torch.cat([test.x] * repeats)[: case.inputs], test


def contenders(
    case: Case, posterior: BBB, x: Tensor, peers: Sequence[str], effort: Effort
) -> dict[str, Callable[[], Work]]:
    """Make each contender's prediction of all inputs in one batch."""

    def credo(**options: Any) -> Callable[[], Work]:
        return lambda: lambda: predict(posterior, x, draws=case.draws, batch_size=len(x), **options)

    def loop(peer: str) -> Callable[[], Work]:
        def make() -> Work:
            net = build_model(case.model, inputs=case.shape, classes=CLASSES, seed=0)
            predictor = PEERS[peer].predictor(net, case.draws)
            return lambda: predictor(x)

        return make

    rows: dict[str, Callable[[], Work]] = {REFERENCE: lambda: _forward_passes(posterior.model, x, case.draws)}
    rows |= {f"bbb {name}": credo(strategy=name) for name in STRATEGIES}
    if case.trained:
        rows[ADAPTIVE] = credo(tolerance=effort.tolerance)
    return rows | {peer: loop(peer) for peer in peers if PEERS[peer].version() is not None}


def _forward_passes(net: nn.Module, x: Tensor, count: int) -> Work:
    @torch.no_grad()
    def work() -> None:
        for _ in range(count):
            net(x)

    return work


def result_tables(numbers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Time and quality as pages take them from a record."""
    time = as_result(list(numbers), _times(numbers), _gaps(numbers))
    judged = _judged(numbers)
    return {"time": time} | ({"quality": as_result(_QUALITY, judged)} if judged else {})


def tables(numbers: dict[str, dict[str, Any]]) -> str:
    """Both tables, with the reasons for gaps under the first."""
    title = "Prediction relative to S forward passes: median (10–90 %)"
    parts = [table(title, list(numbers), _times(numbers))]
    if gaps := _gaps(numbers):
        parts.append("\n".join(gaps) + "\n")
    if judged := _judged(numbers):
        parts.append(table("Adaptive against full", _QUALITY, judged))
    return "\n".join(parts)


def _times(numbers: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    names = [row for row in dict.fromkeys(row for case in numbers.values() for row in case["time"]) if _is_known(row)]
    names.sort(key=lambda row: (row != REFERENCE, row in PEERS))
    return {row: [_time_cell(row, case["time"].get(row)) for case in numbers.values()] for row in names}


def _is_known(row: str) -> bool:
    """Whether a row is not of a strategy that was removed."""
    return not row.startswith("bbb ") or row in (ADAPTIVE, *(f"bbb {name}" for name in STRATEGIES))


def _gaps(numbers: dict[str, dict[str, Any]]) -> list[str]:
    """Why rows have gaps."""
    gaps: dict[tuple[str, str], list[str]] = {}
    for name, case in numbers.items():
        for row, entry in case["time"].items():
            if entry.get("missing", MISSING) != MISSING and _is_known(row):
                gaps.setdefault((row, entry["missing"]), []).append(name)
    return [f"{row} ({', '.join(where)}): {why}" for (row, why), where in gaps.items()]


def _judged(numbers: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    judged: dict[str, list[str]] = {}
    for name, case in numbers.items():
        if "quality" in case:
            judged |= {f"{name}, {row}": _quality_cells(case, row) for row in (FULL, ADAPTIVE)}
            judged[f"{name}, difference"] = _difference_cells(case["quality"]["difference"])
    return judged


def _time_cell(row: str, entry: dict[str, Any] | None) -> str:
    if entry is None or "missing" in entry:
        return MISSING if entry is not None and entry["missing"] == MISSING else "–"
    if row == REFERENCE:
        return f"1 = {milliseconds(entry['milliseconds'])}"
    return f"{entry['median']:.2f} ({entry['low']:.2f}–{entry['high']:.2f})"


def _quality_cells(case: dict[str, Any], row: str) -> list[str]:
    found, time = case["quality"][row], case["time"][row]
    accuracy = f"{100 * found['accuracy']:.2f} ± {100 * found['accuracy_error']:.2f} %"
    nll = f"{found['nll']:.4f} ± {found['nll_error']:.4f}"
    return [accuracy, nll, f"{found['draws']:.1f}", f"{time['median']:.2f}"]


def _difference_cells(found: dict[str, float]) -> list[str]:
    accuracy = f"{100 * found['accuracy']:+.2f} ± {100 * found['accuracy_error']:.2f} %"
    return [accuracy, f"{found['nll']:+.4f} ± {found['nll_error']:.4f}", f"{found['draws']:+.1f}", ""]


if __name__ == "__main__":
    main()
