"""How many passes a prediction of given precision takes on trained conv nets, instead of 100 for every input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import credo
from benchmarks.report import Run, parser_for, progress, table
from credo import METHODS, Posterior
from credo.data import Batches, Split, as_float, load_dataset
from credo.models import build_model

_EPILOG = """\
Reading the table
  Counted, not timed: a pass is one input through one draw of the network; 1 = 100 passes for every input. An input gets
  no further draws once the standard error of each of its class probabilities, which is estimated from its own draws,
  is at most the tolerance; never more than 100. The error is the root mean square, over inputs and classes, of the
  distance to an average of many other draws. "Far off" are inputs with a class probability that is more than three
  tolerances, and three errors of that average, from it.

Examples
  python -m benchmarks.adaptive_draws --json results/benchmarks/adaptive_draws.json
  python -m benchmarks.adaptive_draws --quick                        does everything run?

A run that was stopped goes on from its record, case by case. About ten minutes of one processor.
"""
DRAWS = 100
TOLERANCES = (0.005, 0.01, 0.02)
METHOD_NAMES = ("bbb", "vogn", "ivon", "noisy-kfac", "mc-dropout")


@dataclass(frozen=True)
class Case:
    """A conv net and its data set.

    Attributes:
        model: The network.
        data: The data set.
        rows: Images to train on.
        epochs: Passes over them.
        test: Images to predict.
        reference: Draws of the average that errors are measured from.
        methods: Methods that it is trained by.
    """

    model: str
    data: str
    rows: int
    epochs: int
    test: int
    reference: int
    methods: tuple[str, ...] = METHOD_NAMES


CASES = {
    "lenet5": Case("lenet5", "fashion-mnist", 5000, 4, 500, 400),
    "resnet20": Case("resnet20", "cifar10", 1000, 2, 60, 150, ("bbb", "ivon")),
}


def trained(case: Case, method: str) -> tuple[Posterior, Split]:
    """A posterior trained with the defaults of `credo.fit`, and the images to predict."""
    data = load_dataset(case.data)
    train, test = (
        Split(as_float(part.x[:count]), part.y[:count])
        for part, count in ((data.train, case.rows), (data.test, case.test))
    )
    net: nn.Module = build_model(case.model, inputs=data.input_shape, classes=data.classes, seed=0)
    posterior: Posterior = METHODS[method](net, data_size=case.rows)  # type: ignore[call-arg]
    credo.fit(posterior, Batches(train, batch_size=64), epochs=case.epochs, schedule="cosine", progress=False)
    return posterior.eval(), test


def measure(case: Case, method: str) -> dict[str, Any]:
    """Passes and errors, with all draws and by tolerance."""
    posterior, test = trained(case, method)
    batches = [(test.x, test.y)]
    many = credo.predict(posterior, batches, draws=case.reference, seed=1)
    found = {"all": _compared(credo.predict(posterior, batches, draws=DRAWS, seed=2), many, test, case, math.inf)}
    for tolerance in TOLERANCES:
        adaptive = credo.predict(posterior, batches, draws=DRAWS, tolerance=tolerance, seed=2)
        found[f"{tolerance}"] = _compared(adaptive, many, test, case, tolerance)
    return found


def _compared(prediction: Any, many: Any, test: Split, case: Case, tolerance: float) -> dict[str, float]:
    gap: Tensor = (prediction.probs - many.probs).double()
    # Errors of the average itself are known from its draws.
    errors = many.mc_error.double()
    rows = torch.arange(len(test.y))
    nll, best = (p.probs.double()[rows, test.y].clamp_min(1e-12).log().neg().mean() for p in (prediction, many))
    return {
        "passes": float(prediction.draws_used.double().mean()) / DRAWS,
        "error": float(gap.square().mean().sqrt()),
        "reference_error": float(errors.square().mean().sqrt()),
        "far_off": float((gap.abs().amax(1) > 3 * (tolerance + errors)).double().mean()),
        "accuracy": float((prediction.probs.argmax(1) == test.y).double().mean()),
        "nll": float(nll),
        "nll_above": float(nll - best),
    }


def result_table(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The table of all cases, as pages take it from a record."""
    rows = []
    for name, found in numbers.items():
        whole = found["all"]
        rows.append([name, "–", "1.00", f"{whole['error']:.4f}", "–", f"{100 * whole['accuracy']:.1f} %", "–"])
        for tolerance in TOLERANCES:
            one = found[f"{tolerance}"]
            rows.append(
                [
                    "",
                    f"{tolerance}",
                    f"{one['passes']:.2f}",
                    f"{one['error']:.4f}",
                    f"{100 * one['far_off']:.1f} %",
                    f"{100 * one['accuracy']:.1f} %",
                    f"{one['nll'] - whole['nll']:+.4f}",
                ]
            )
    columns = ["", "tolerance", "passes", "error", "far off", "accuracy", "NLL − that of 100"]
    cases = "; ".join(
        f"{c.model} on {c.rows} images of {c.data}, {c.epochs} epochs, {c.test} test images, errors from an average of "
        f"{c.reference} draws"
        for c in CASES.values()
    )
    return {"columns": columns, "rows": rows, "notes": [f"{cases}."]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the record does not have yet, print, write."""
    options = parser_for("adaptive_draws", what=__doc__ or "", epilog=_EPILOG, peers=False).parse_args(argv)
    cases = CASES
    if options.quick:
        cases = {"convnet": Case("convnet", "digits", 100, 1, 20, 20)}
    todo = [(f"{name}, {method}", case, method) for name, case in cases.items() for method in case.methods]
    todo = todo[:2] if options.quick else todo
    run = Run("adaptive_draws", {"quick": options.quick, "draws": DRAWS, "tolerances": list(TOLERANCES)}, 1)
    numbers = run.resumed(options.json)
    with progress(f"{len(todo)} posteriors", len(todo)) as advance:
        for name, case, method in todo:
            if name not in numbers:
                numbers[name] = measure(case, method)
                run.keep(numbers, options.json, {"passes": result_table(numbers)})
            advance()
    made = result_table(numbers)
    print(table("Passes", made["columns"][1:], {f"{i}. {row[0]}": row[1:] for i, row in enumerate(made["rows"])}))
    run.finish(numbers, options.json, tables={"passes": made})


if __name__ == "__main__":
    main()
