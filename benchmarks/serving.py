"""Two services of one posterior under load: `credo.predictor`, and its exported file in onnxruntime.

Eight clients call a FastAPI application in this process, without sockets, for a bounded number of requests: requests a
second, latencies, errors and the growth of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch import Tensor, nn

import credo
from benchmarks.report import table

CLIENTS, DRAWS, FEATURES = 8, 16, 64
Answer = Callable[[Tensor], tuple[Any, Any]]


def posterior() -> credo.Posterior:
    """BBB of a small network; its weights are not trained, which costs the same."""
    torch.manual_seed(0)
    return credo.BBB(nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 10)), data_size=1000)


def by_predictor(model: credo.Posterior) -> Answer:
    """Probabilities and epistemic uncertainty by Credo."""
    fixed = credo.predictor(model, draws=DRAWS, seed=0)

    def answer(x: Tensor) -> tuple[Any, Any]:
        found: Any = fixed(x)
        return found.probs.tolist(), found.epistemic.tolist()

    return answer


def by_file(model: credo.Posterior, folder: Path) -> Answer:
    """The same by the exported file, which needs onnxruntime alone."""
    import onnxruntime

    path = credo.export(model, torch.rand(2, FEATURES), folder / "model.onnx", draws=DRAWS, seed=0)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def answer(x: Tensor) -> tuple[Any, Any]:
        probs, _, _, epistemic = session.run(None, {"input": x.numpy()})
        return probs.tolist(), epistemic.tolist()

    return answer


def service(answer: Answer) -> FastAPI:
    """An application with one endpoint, which FastAPI runs in a pool of threads."""
    app = FastAPI()

    @app.post("/predict")
    def predict(rows: list[list[float]]) -> dict[str, Any]:
        probs, epistemic = answer(torch.tensor(rows))
        return {"probs": probs, "epistemic": epistemic}

    return app


def load(app: FastAPI, requests: int, clients: int = CLIENTS) -> dict[str, float]:
    """Requests a second, milliseconds, errors and megabytes, of `requests` by as many threads as `clients`."""
    rows = torch.rand(40, 1, FEATURES, generator=torch.Generator().manual_seed(0)).tolist()
    with TestClient(app) as client:
        alone = [client.post("/predict", json=row).json() for row in rows]

        def ask(index: int) -> tuple[float, bool]:
            start = time.perf_counter()
            found = client.post("/predict", json=rows[index % len(rows)])
            taken = time.perf_counter() - start
            return taken, found.status_code == 200 and found.json() == alone[index % len(rows)]

        before, start = _peak(), time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            done = list(pool.map(ask, range(requests)))
        seconds = time.perf_counter() - start
    cuts = quantiles([taken for taken, _ in done], n=100)
    return {
        "requests": requests,
        "clients": clients,
        "per_second": requests / seconds,
        "p50_ms": 1000 * cuts[49],
        "p99_ms": 1000 * cuts[98],
        "errors": sum(not right for _, right in done),
        "grown_mb": _peak() - before,
    }


def _peak() -> float:
    """The most memory that this process has used, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Print the table of both services."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="requests to each service, at most 100000")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args(arguments)
    requests, model = min(args.requests, 100_000), posterior()
    with tempfile.TemporaryDirectory() as folder:
        services = {"credo.predictor": by_predictor(model), "exported file": by_file(model, Path(folder))}
        found = {name: load(service(answer), requests) for name, answer in services.items()}
    rows = {
        name: [
            f"{r['per_second']:.0f}",
            f"{r['p50_ms']:.1f}",
            f"{r['p99_ms']:.1f}",
            str(r["errors"]),
            f"{r['grown_mb']:.1f}",
        ]
        for name, r in found.items()
    }
    columns = ["requests/s", "p50 ms", "p99 ms", "errors", "memory grown, MB"]
    print(table(f"{requests} requests of one row by {CLIENTS} clients, {DRAWS} draws", columns, rows))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
