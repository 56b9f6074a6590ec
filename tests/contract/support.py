"""What works with what: every method is tried on every kind of target and network, and the answers are a table.

`python docs/make_results.py` writes them into results/support/table.json, which docs/support.md shows;
test_support.py tries again, and compares.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.contract.conftest import METHODS as ROWS
from tests.contract.conftest import Row
from tests.contract.test_odd_networks import NETWORKS, inputs_for
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.posterior import GaussianPosterior

Target = tuple[str | dict[str, Any], Callable[[Tensor], Tensor], Callable[[], nn.Module]]
SIZE = 12
POINTS = (credo.MAP, credo.OGN, credo.KFAC)
YES, NO = "✓", "no"
RECORDS = Path(__file__).parents[2] / "results" / "benchmarks"


def mlp(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def counts(x: Tensor) -> Tensor:
    return x[:, :1].exp().round()


def numbers(x: Tensor) -> Tensor:
    return x[:, :1]


def classes(x: Tensor) -> Tensor:
    return torch.bucketize(x[:, 0].contiguous(), torch.tensor([-0.4, 0.4]))


def times(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1].exp().clamp(max=2.0), (x[:, :1].exp() < 2).float()], 1)


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))


TARGETS: dict[str, Target] = {  # described by name, so that each network of an ensemble has its own
    "classes": ("categorical", classes, mlp(3)),
    "yes or no": ("bernoulli", lambda x: (x[:, :1] > 0).float(), mlp(1)),
    "several labels": ("multi-label", lambda x: (x[:, :3] > 0).float(), mlp(3)),
    "ordered classes": ({"kind": "ordinal", "classes": 3}, classes, mlp(1)),
    "numbers": ("gaussian", numbers, mlp(1)),
    "noise of each row": ({"kind": "gaussian", "heteroscedastic": True}, numbers, mlp(2)),
    "outliers": ("student-t", numbers, mlp(1)),
    "several modes": ({"kind": "mixture-density", "components": 2}, numbers, mlp(6)),
    "quantiles": ("quantiles", numbers, mlp(3)),
    "counts": ("poisson", counts, mlp(1)),
    "varying counts": ("negative-binomial", counts, mlp(1)),
    "times": ("censored-times", times, mlp(1)),
    "tokens": ("categorical", lambda x: (x.view(-1, 2, 2)[..., 0] > 0).long(), tokens),
    "pixels": ({"kind": "categorical", "class_dim": -3}, lambda x: (x.view(-1, 2, 2) > 0).long(), pixels),
}
SHAPES = {"tokens": (2, 2), "pixels": (1, 2, 2)}
KINDS = {  # columns of the second table, and the networks of the contract
    "LSTM": "lstm",
    "attention": "attention",
    "transformer layer": "transformer",
    "tied weights": "tied embedding",
    "a layer used twice": "layer placed twice",
    "weight norm": "weight norm",
    "spectral norm": "spectral norm",
}


def row_of(method: str) -> Row:
    """The first row of the contract that is of this method; of dropout, the one with a rate."""
    return ROWS[{"mc-dropout": "mc-dropout rate"}.get(method) or next(n for n in ROWS if n.split()[0] == method)]


def trains_and_predicts(method: str, target: str) -> str:
    """Whether a method trains on a kind of target and predicts it; a refusal is a `ValueError`, all else is raised.

    Args:
        method: Its registered name.
        target: A key of `TARGETS`.
    """
    likelihood, labels, network = TARGETS[target]
    x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))
    batches = [(x.view(SIZE, *SHAPES.get(target, (4,))), labels(x))]

    def seeded(index: int) -> nn.Module:
        torch.manual_seed(index)
        return network()

    try:
        posterior = row_of(method).build(seeded, data_size=SIZE, likelihood=likelihood)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", credo.CredoWarning)
            credo.fit(posterior, batches, epochs=4, progress=False)
            found = credo.predict(posterior, batches, draws=3)
    except ValueError:
        return NO
    assert math.isfinite(float(found.log_likelihood.double().mean())), (method, target)
    return YES


def takes(method: str, network: str) -> str:
    """Whether a method makes steps with a kind of network.

    Args:
        method: Its registered name.
        network: A key of `KINDS`.
    """
    make, kind = NETWORKS[KINDS[network]]
    x, y = inputs_for(kind)

    def seeded(index: int) -> nn.Module:
        torch.manual_seed(index)
        return make()

    try:
        posterior = row_of(method).build(seeded)
        assert math.isfinite(posterior.step(lambda net: F.cross_entropy(net(x), y)).loss)
    except ValueError:
        return NO
    return YES


TRAITS: dict[str, Callable[[str], bool]] = {
    "draws of weights": lambda name: row_of(name).weights and credo.METHODS[name] not in POINTS,
    "mean and std by weight": lambda name: issubclass(credo.METHODS[name], GaussianPosterior),
    "linearised predictions": lambda name: credo.METHODS[name].is_linearisable,
    "several processes": lambda name: credo.METHODS[name].averages_over_processes,
    "a torch optimiser": lambda name: credo.METHODS[name].__name__ in credo.optim.__all__,
}


def traits(method: str) -> list[str]:
    """What the rest of the library can do with a method, by what its class says.

    Args:
        method: Its registered name.
    """
    return [YES if has(method) else NO for has in TRAITS.values()]


def costs(method: str) -> list[str]:
    """What a step and a prediction cost, from the records of the benchmarks; a dash where there is none.

    Args:
        method: Its registered name.
    """
    steps = [json.loads((RECORDS / f"step_cost{end}.json").read_text(encoding="utf-8")) for end in ("", "_samplers")]
    found = []
    for network in ("mlp", "lenet5", "resnet20"):
        rows = [record["numbers"][network][method] for record in steps if method in record["numbers"][network]]
        found.append(f"{rows[0]['median']:.1f}" if rows else "–")
    memory = steps[0]["numbers"]["resnet20"].get(method, {}).get("memory")
    quality = json.loads((RECORDS / "quality" / "digits.json").read_text(encoding="utf-8"))["tables"]["methods"]
    ratios = {row[0]: row[-2:] for row in quality["rows"]}
    return [*found, f"{memory:.1f}" if memory else "–", *ratios.get(method, ["–", "–"])]


COSTS = ["step, MLP", "step, LeNet-5", "step, ResNet-20", "peak memory", "prediction", "numbers"]


def table(columns: list[str], answer: Callable[[str], list[str]]) -> dict[str, Any]:
    return {"columns": ["", *columns], "rows": [[f"`{name}`", *answer(name)] for name in credo.METHODS], "notes": []}


def write_tables(folder: Path) -> None:
    """Try everything, and write what came out.

    Args:
        folder: Where `table.json` goes.
    """
    tables = {
        "targets": table(list(TARGETS), lambda name: [trains_and_predicts(name, one) for one in TARGETS]),
        "networks": table(list(KINDS), lambda name: [takes(name, one) for one in KINDS]),
        "traits": table(list(TRAITS), traits),
        "costs": table(COSTS, costs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"tables": tables}, indent=1, ensure_ascii=False) + "\n"
    folder.joinpath("table.json").write_text(text, encoding="utf-8")
