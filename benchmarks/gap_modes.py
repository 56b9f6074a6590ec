"""How near a Laplace approximation can be to the true posterior on the task `gap`: around exact modes of it.

    python -m benchmarks.gap_modes --json results/benchmarks/gap_modes.json

Each start is brought to a mode by L-BFGS in double precision, so that neither the length nor the noise of a training
matters; HMC's chains are those of `benchmarks.fidelity`. The last layer also gets the prior that its evidence chooses,
there and on networks of 20 and 200 hidden units that were trained without a prior.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import credo
from benchmarks.fidelity.__main__ import FOLDER, REFERENCE, measures
from benchmarks.fidelity.contenders import reference
from benchmarks.fidelity.tasks import Problem, gap
from benchmarks.report import Run, parser_for, progress, table

STARTS = 8
COLUMNS = {"gradient": "gradient", "log_joint": "log joint", "mean": "mean", "w1": "W1", "ratio": "gap ratio"}


def mode(problem: Problem, seed: int) -> tuple[nn.Module, float, float]:
    """A network at a mode of the posterior, its log density there without constants, and the norm of its gradient."""
    net = problem.network(seed).double()
    x, y = (each.double() for each in problem.train)
    precisions = {n: float(p.shape[1]) if p.dim() > 1 else 1.0 for n, p in net.named_parameters()}
    optimizer = torch.optim.LBFGS(
        net.parameters(),
        max_iter=20_000,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        assert problem.noise is not None
        prior = sum(precisions[name] * p.square().sum() for name, p in net.named_parameters())
        total = 0.5 * ((y - net(x)).square().sum() / problem.noise**2 + prior)
        total.backward()
        return total

    for _ in range(4):  # a line search that failed starts anew
        optimizer.step(loss)
    value = -float(loss().detach())
    norm = float(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm())
    return net.float(), value, norm


def user_trained(problem: Problem, width: int, seed: int) -> nn.Module:
    """A ReLU network as users train it: by Adam, without a prior."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(problem.train[0]), problem.train[1]).backward()
        optimizer.step()
    return net


def main(given: list[str] | None = None) -> None:
    """Measure the full and the last-layer approximations of each start."""
    parser = parser_for("gap_modes", what=__doc__ or "", epilog="", peers=False)
    chosen = parser.parse_args(given)
    starts = 1 if chosen.quick else STARTS
    run = Run("gap_modes", {"task": "gap", "starts": starts}, threads=1)
    problem = gap(0)
    if chosen.quick:
        problem.chains.update(chains=2, warmup=4, samples=16)  # type: ignore[union-attr]
    folder = Path(chosen.json).parent if chosen.quick and chosen.json else FOLDER
    truth = reference(problem, 0, folder / "chains" / "gap-0.pt")
    numbers: dict[str, Any] = {REFERENCE: summary(measures(truth, truth, problem))}
    with progress("gap", starts) as advance:
        for seed in range(starts):
            net, value, norm = mode(problem, seed)
            given_prior = {"prior": problem.prior()}
            kinds: dict[str, tuple[nn.Module, dict[str, Any]]] = {
                "full": (net, {"random": "all", "structure": "full", **given_prior}),
                "last": (net, given_prior),
                "evidence": (net, {}),
                "narrow": (user_trained(problem, 20, seed), {}),
                "wide": (user_trained(problem, 200, seed), {}),
            }
            for name, (each, options) in kinds.items():
                posterior = credo.Laplace(
                    each, data_size=len(problem.train[0]), likelihood=problem.likelihood(), **options
                ).fit([problem.train], progress=False)
                found = summary(measures(posterior, truth, problem))
                at = {"log_joint": value, "gradient": norm} if each is net else {}
                numbers[f"{name}, start {seed}"] = {**at, **found}
            advance()
    rows = {name: [format(found.get(key, float("nan")), ".3g") for key in COLUMNS] for name, found in numbers.items()}
    print(table("Laplace at exact modes", [*COLUMNS.values()], rows))
    run.finish(numbers, chosen.json, tables={"modes": make_table(numbers)})


def make_table(numbers: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The least and largest number of all starts, for the page."""
    keys = {"mean": "distance of the means", "w1": "W1", "std_ratio": "std ratio", "ratio": "gap ratio"}
    rows = []
    kinds = {REFERENCE: "HMC, half of its draws", "full": '`structure="full"`, all layers', "last": "last layer"}
    kinds |= {
        "evidence": "last layer, prior by its evidence",
        "narrow": "the same, 20 units trained without a prior",
        "wide": "the same, 200 units trained without a prior",
    }
    for kind, what in kinds.items():
        own = [found for name, found in numbers.items() if name.startswith(kind)]
        ends = [(min(found[key] for found in own), max(found[key] for found in own)) for key in keys]
        rows.append([what, *(f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}" for low, high in ends)])
    return {"columns": ["around", *keys.values()], "rows": rows, "notes": []}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Distance of the means, W1, ratio of the standard deviations, and the gap ratio."""
    near = {key: found[key]["value"] for key in ("mean", "w1", "std_ratio")}
    return {**near, "ratio": found["gap_ratio"]}


if __name__ == "__main__":
    main()
