"""Draw the pictures of README and docs: `python docs/make_pictures.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import matplotlib.pyplot as plt
import torch
from benchmarks.fidelity.__main__ import ACROSS, CURVE, UP
from benchmarks.fidelity.table import by_contender
from benchmarks.fidelity.tasks import TASKS

import credo
from credo.data import Batches, Split, load_dataset, split_validation
from credo.models import build_model

IMAGES = Path(__file__).parent / "images"
RECORDS = Path(__file__).parent.parent / "results" / "benchmarks"
OURS, PEERS, POINT = "#1f4e8c", "#a8611a", "#444"
# Names on the other side of their point, which would cover others or the frame.
BELOW = (
    "vogn", "ivon-opt", "laplace-torch", "VOGN", "IVON", "ensemble of 5", "Laplace kron", "VOGN T=1", "MC-dropout 0.1"
)  # fmt: skip
LEFT = ("map", "Laplace last", "Laplace kron", "Laplace full", "BBB", "VOGN", "SWAG", "MC-dropout 0.1")
# The families of the curves and of the maps.
DRAWN = (
    "MAP", "ensemble of 5", "MC-dropout 0.1", "NodeBNN", "BBB T=1", "VOGN T=1", "noisy K-FAC", "SWAG",
    "Laplace last", "Laplace kron", "Laplace full", "SGHMC T=1 constant",
)  # fmt: skip
MAPPED = (
    "HMC", "SGHMC T=1 constant", "Laplace full", "noisy K-FAC", "BBB T=1", "ensemble of 5", "SWAG", "NodeBNN"
)  # fmt: skip


def gap() -> None:
    """Regression with a hole in its data: a plain network, and Laplace's approximation of it."""
    data = load_dataset("gap", n=200)
    x = torch.linspace(-3.0, 3.0, 240).unsqueeze(1)
    posteriors = gap_posteriors(data.train)
    figure, axes = plt.subplots(1, len(posteriors), figsize=(4.4 * len(posteriors), 3.4), sharey=True)
    for axis, (title, posterior) in zip(axes, posteriors.items(), strict=True):
        prediction = credo.predict(posterior, x, draws=400)
        mean, total = prediction.mean[:, 0], prediction.total[:, 0]
        axis.fill_between(
            x[:, 0], mean - 2 * total, mean + 2 * total, color="#7aa6d8", alpha=0.4, lw=0, label="95 % band"
        )
        axis.plot(x[:, 0], mean, color="#1f4e8c", lw=2, label="mean")
        axis.plot(data.train.x[:, 0], data.train.y[:, 0], ".", color="#444", ms=3, label="training data")
        axis.set_title(title, fontsize=11)
        axis.set_ylim(-3, 3)
    axes[0].legend(loc="lower left", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(IMAGES / "gap.png", dpi=110)


def reliable_answers() -> None:
    """Sizes of conformal sets, and the entropy with the threshold of abstention, of digits and of photographs."""
    digits, patches = load_dataset("digits"), load_dataset("photo-patches").test
    train, held_out = split_validation(digits.train, size=0.4, seed=0)
    for_sets, for_abstention = split_validation(held_out, size=0.6, seed=1)
    model = build_model("mlp", inputs=digits.input_shape, classes=10, hidden=[64], seed=0)
    posterior = credo.BBB(model, data_size=len(train), lr=5e-3, prior=0.3, temperature=0.1)
    credo.fit(posterior, Batches(train, batch_size=64), epochs=15)
    credo.conformal(posterior, [(for_sets.x, for_sets.y)], alpha=0.02)
    test, away, fresh = (credo.predict(posterior, [(s.x, s.y)]) for s in (digits.test, patches, for_abstention))
    rule = credo.evaluate.risk_control(fresh.probs, fresh.targets, fresh.total, max_error=0.05)
    colours = {"digits": "#1f4e8c", "photographs": "#d08a3e"}
    predictions = {"digits": test, "photographs": away}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2))
    for shift, (name, prediction) in enumerate(predictions.items()):
        sizes = torch.bincount(prediction.sets.sum(1), minlength=6)[:6] / len(prediction)
        axes[0].bar(torch.arange(6) + 0.4 * shift - 0.2, sizes, 0.38, color=colours[name], label=name)
        entropies = {"bins": 30, "range": (0, 2.3), "density": True, "alpha": 0.7}
        axes[1].hist(prediction.total, color=colours[name], label=name, **entropies)
    axes[1].axvline(rule.threshold, color="#444", ls="--", label="answers are accepted below this")
    axes[0].set(xlabel="classes in the set", ylabel="fraction of inputs", title="98 % sets: no promise for photographs")
    axes[1].set(xlabel="entropy, nats", title="abstention: at most 5 % errors among accepted digits")
    for axis in axes:
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGES / "reliable_answers.png", dpi=110)


def intervals() -> None:
    """90 % intervals of equal width, and those that are wider where the posterior doubts, with what they cover."""
    x = 4 * torch.rand(1800, 1, generator=torch.Generator().manual_seed(0)) - 2
    noise = 0.05 + 0.25 * (x + 2)
    y = torch.sin(2 * x) + noise * torch.randn(1800, 1, generator=torch.Generator().manual_seed(1))
    posterior = credo.BBB(
        build_model("mlp", inputs=[1], classes=2, hidden=[50], seed=0),
        data_size=600,
        lr=1e-2,
        likelihood={"kind": "gaussian", "heteroscedastic": True},
    )
    credo.fit(posterior, Batches(Split(x[:600], y[:600]), batch_size=50), epochs=60)
    new, order = slice(1200, 1800), x[1200:, 0].argsort()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
    for axis, kind in zip(axes, ("split", "normalised"), strict=True):
        credo.conformal(posterior, [(x[600:1200], y[600:1200])], alpha=0.1, kind=kind)
        posterior.ledger = credo.Ledger()  # the same rows choose both
        found = credo.predict(posterior, [(x[new], y[new])])
        low, high = found.lower[:, 0], found.upper[:, 0]
        inside = (low <= y[new, 0]) & (y[new, 0] <= high)
        axis.fill_between(x[new, 0][order], low[order], high[order], color="#7aa6d8", alpha=0.4, lw=0)
        axis.plot(x[new, 0][inside], y[new, 0][inside], ".", color="#444", ms=3, label="inside")
        axis.plot(x[new, 0][~inside], y[new, 0][~inside], ".", color="#d08a3e", ms=5, label="missed")
        noisy = x[new, 0] > 0
        covered = [f"{100 * float(inside[part].double().mean()):.0f} %" for part in (~noisy, noisy)]
        width = float((high - low).mean())
        axis.set_title(f"{kind}: width {width:.2f}; left half {covered[0]}, right half {covered[1]}", fontsize=10)
    axes[0].legend(loc="upper left", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(IMAGES / "intervals.png", dpi=110)


def numbers(file: str) -> dict[str, Any]:
    """What a benchmark's record has measured."""
    found: dict[str, Any] = json.loads((RECORDS / file).read_text(encoding="utf-8"))["numbers"]
    return found


def named(axis: Any, name: str, place: tuple[float, float], colour: str) -> None:
    """Write a point's name beside it."""
    offset = (-6 if name in LEFT else 5, -10 if name in BELOW else 3)
    side = "right" if name in LEFT else "left"
    axis.annotate(name, place, xytext=offset, textcoords="offset points", fontsize=8, color=colour, ha=side)


def cost_and_quality() -> None:
    """Training time and test NLL of every method and other library, after the same tuning, from the records."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    titles = {"digits": "digits, MLP: mean of 5 seeds", "fashion-mnist": "Fashion-MNIST, LeNet-5: mean of 2 seeds"}
    for axis, (task, title) in zip(axes, titles.items(), strict=True):
        found = numbers(f"quality/{task}.json")
        seconds = {name: sum(run["train_seconds"] for run in one["runs"]) for name, one in found.items()}
        for name, one in found.items():
            nll = sum(run["nll"] for run in one["runs"]) / len(one["runs"])
            cost, colour = seconds[name] / seconds["map"], PEERS if one["peer"] else POINT if name == "map" else OURS
            axis.plot(cost, nll, "s" if one["peer"] else "o", color=colour, ms=6)
            named(axis, name, (cost, nll), colour)
        axis.set(xscale="log", xlabel="processor time of training, plain network = 1", ylabel="test NLL", title=title)
        axis.set_xticks([1, 2, 4], ["1", "2", "4"])
        axis.set_xticks([], minor=True)
        axis.margins(x=0.25, y=0.12)
    figure.tight_layout()
    figure.savefig(IMAGES / "cost_and_quality.png", dpi=110)


def families() -> None:
    """Distance from HMC on the data and in a hole between them, from the records."""
    figure, axis = plt.subplots(figsize=(7, 4.4))
    for name, seeds in by_contender(numbers("fidelity/gap.json")).items():
        if name == "HMC":  # far below on the left
            continue
        place = tuple(fmean(one["w1"]["value"] for one in where) for where in (seeds, [s["between"] for s in seeds]))
        axis.plot(*place, "o", color=OURS, ms=6)
        named(axis, name, place, OURS)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="distance from HMC's function values on the data (W1)",
        ylabel="the same in the hole",
    )
    axis.set_xticks([0.03, 0.05, 0.1, 0.2], ["0.03", "0.05", "0.1", "0.2"])
    axis.set_yticks([0.1, 0.2, 0.3, 0.4], ["0.1", "0.2", "0.3", "0.4"])
    axis.minorticks_off()
    axis.margins(x=0.15, y=0.1)
    figure.tight_layout()
    figure.savefig(IMAGES / "families.png", dpi=110)


def first_seed(task: str) -> dict[str, Any]:
    """The records of a task's first seed, by contender."""
    found = numbers(f"fidelity/{task}.json").items()
    return {name.removesuffix(", seed 0"): one for name, one in found if name.endswith(", seed 0")}


def curves() -> None:
    """The curve with a hole under every family, beside HMC, from the records of the fidelity benchmark."""
    found, (x, y) = first_seed("gap"), TASKS["gap"](0).train
    truth = found["HMC"]["curve"]
    figure, axes = plt.subplots(3, 4, figsize=(12, 7.2), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, DRAWN, strict=True):
        for curve, colour, label in ((truth, POINT, "HMC"), (found[name]["curve"], OURS, name)):
            mean, std = torch.tensor(curve["mean"]), torch.tensor(curve["std"])
            axis.fill_between(CURVE, mean - 2 * std, mean + 2 * std, color=colour, alpha=0.3, lw=0, label=label)
            axis.plot(CURVE, mean, color=colour, lw=1.2)
        axis.plot(x[:, 0], y[:, 0], ".", color="black", ms=3)
        ratio = found[name].get("gap_ratio")
        axis.set_title(f"{name}: {'no spread' if ratio is None else f'{ratio:.1f} ×'}", fontsize=10)
    axes[0, 0].set(xlim=(-2.5, 2.5), ylim=(-2.2, 2.2))
    figure.suptitle(
        "Blue: mean ± 2 std over draws; grey: HMC. The number is the std in the hole over that on the data, "
        f"{found['HMC']['gap_ratio']:.1f} × for HMC",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(IMAGES / "families_curves.png", dpi=90)


def maps() -> None:
    """Where draws disagree about the classes of two moons, under HMC and several families, from the same records."""
    found, (x, y) = first_seed("moons"), TASKS["moons"](0).train
    extent = (float(ACROSS[0]), float(ACROSS[-1]), float(UP[0]), float(UP[-1]))
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.6), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, MAPPED, strict=True):
        grid = {key: torch.tensor(read_hundredths(rows)) for key, rows in found[name]["map"].items()}
        shown = axis.imshow(grid["std"], origin="lower", extent=extent, vmin=0, vmax=0.35, cmap="Blues", aspect="auto")
        axis.contour(ACROSS, UP, grid["mean"], levels=[0.5], colors=[POINT], linewidths=1)
        axis.scatter(x[:, 0], x[:, 1], c=["#a8611a" if label else "black" for label in y.tolist()], s=5)
        axis.set_title(name, fontsize=10)
    figure.colorbar(shown, ax=axes, label="std over draws of the probability of a class", fraction=0.03, pad=0.01)
    figure.savefig(IMAGES / "families_maps.png", dpi=90, bbox_inches="tight")


def read_hundredths(rows: list[str]) -> list[list[float]]:
    """The numbers of a grid, of two digits each."""
    return [[int(row[index : index + 2]) / 100 for index in range(0, len(row), 2)] for row in rows]


def gap_posteriors(train: Split) -> dict[str, credo.Posterior]:
    """A trained network, and its full Laplace approximation under the prior and noise that the evidence chose.

    HMC is not drawn: under this prior R̂ in the hole was 1.48 after 35,000 gradients of 16 chains (docs/fidelity.md).
    """

    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))

    batches = [(train.x, train.y)]
    laplace = credo.Laplace(
        network(),
        data_size=len(train),
        structure="full",
        random="all",
        evidence={"every": 100, "burn_in": 200},
        lr=1e-2,
        likelihood={"kind": "gaussian", "std": 0.2, "learn": True},
    )
    credo.fit(laplace, batches, epochs=2000)
    plain = credo.MAP(laplace.model, data_size=len(train), likelihood=laplace.likelihood)
    return {"plain network": plain, "Credo: Laplace": laplace}


if __name__ == "__main__":
    torch.set_num_threads(1)
    gap()
    reliable_answers()
    intervals()
    cost_and_quality()
    families()
    curves()
    maps()
