"""How far the closed forms of linear class predictions are from the integral, on a last-layer Laplace of digits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.report import table
from credo import MAP, Laplace, fit, predict
from credo.data import Batches, Split, load_dataset
from credo.models import build_model

_EPILOG = """\
Reading the table
  KL(p ‖ link) in nats, averaged over inputs: what the approximation costs in NLL if labels follow p, the average over
  many draws of the function values. "mean": the network at the mean, without any variance. The columns are inputs
  (held-out digits, or digits under noise) and precisions of the prior, with the mean variance of the logits.
"""
_DRAWN = "draws, 32"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__, epilog=_EPILOG)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a few seconds to see that all runs; numbers mean nothing")
    quick = parser.parse_args(arguments).quick
    data = load_dataset("digits")
    train = Split(data.train.x[:400], data.train.y[:400])
    point = MAP(build_model("mlp", inputs=(1, 8, 8), classes=10, hidden=[32], seed=0), data_size=400, lr=1e-2)
    fit(point, Batches(train, batch_size=50), epochs=2 if quick else 40, progress=False)
    test = data.test.x[: 20 if quick else 300]
    noisy = test + torch.randn(test.shape, generator=torch.Generator().manual_seed(0))
    columns: list[str] = []
    rows: dict[str, list[str]] = {}
    for precision in (1.0,) if quick else (100.0, 10.0, 1.0):
        posterior = Laplace(point.model, data_size=400, structure="full", prior_precision=precision)
        posterior.fit(Batches(train, batch_size=100, shuffle=False), progress=False)
        for name, x in (("digits", test), ("under noise", noisy)):
            variance = float(posterior.function_moments(x, diagonal=True)[1].mean())
            columns.append(f"{name}, {precision:g} ({variance:.3g})")
            for link, value in divergences(posterior, x, draws=200 if quick else 5000).items():
                rows.setdefault(link, []).append(f"{value:.4f}")
    print(table("KL to the average over many draws, nats", columns, rows))


def divergences(posterior: Laplace, x: Tensor, *, draws: int) -> dict[str, float]:
    """KL(p ‖ link) of each link, p by so many draws.

    Args:
        posterior: A posterior of a classifier.
        x: Inputs.
        draws: Of the average that counts as exact.
    """
    wanted = predict(posterior, x, link="draws", draws=draws, seed=1).probs.double()
    probs = {link: predict(posterior, x, link=link).probs for link in ("extended-probit", "probit", "bridge")}
    probs[_DRAWN] = predict(posterior, x, link="draws", draws=32).probs
    probs["mean"] = predict(MAP(posterior.model, data_size=1), x).probs
    return {
        link: float((wanted * (wanted.log() - found.double().log())).sum(-1).mean()) for link, found in probs.items()
    }


if __name__ == "__main__":
    main()
