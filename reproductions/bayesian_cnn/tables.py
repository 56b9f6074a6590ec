"""Result tables and the figure of Bayesian CNNs (Shridhar et al. 2019)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproductions.bayesian_cnn.rows import (
    DATA,
    DRAWS,
    FORMS,
    NETWORKS,
    PRINTED,
    PRINTED_DROPOUT,
    PRINTED_PRUNED,
    PRINTED_UNCERTAINTY,
    PRUNED_DRAWS,
    RATES,
    ROWS,
    compared,
)
from reproductions.bayesian_cnn.uncertainty import LINKS
from reproductions.jobs import Record, Records
from reproductions.seeds import by_seed, spread
from reproductions.study import ResultTable, smoke_note

_BY = "(Shridhar et al. 2019)"


def accuracy_table(records: Records, scale: str) -> ResultTable:
    """Table 1: accuracies in %, with a 95 % interval over the test images."""
    rows: list[list[Any]] = []
    for row in ROWS:
        found = [list(by_seed(records, f"{row.key}-{data}").values()) for data in DATA]
        if not any(found):
            continue
        cells: list[Any] = []
        for printed, of_seeds in zip(PRINTED[row.key], found, strict=True):
            cells += [printed, _over_seeds(of_seeds) if of_seeds else None]
        minutes = sum(of_seeds[0]["seconds"] for of_seeds in found if of_seeds) / 60
        rows.append([row.title, *cells, f"{minutes:.1f}"])
    columns = ["network", *(f"{name}{whose}" for name in DATA.values() for whose in (" paper", "")), "min"]
    notes = [
        "Accuracy in %: the paper's on validation images, ours on the test set, of one seed with a 95 % interval "
        "over the images, of several the mean ± standard deviation, with their number. "
        f"Bayesian: {DRAWS[scale]} draws, softplus. min: minutes of training a row's networks on one thread."
    ]
    return ResultTable(f"Table 1: accuracies {_BY}", columns, rows, [*notes, *smoke_note(scale)])


def _over_seeds(of_seeds: list[Record]) -> str:
    if len(of_seeds) == 1:
        return _with_interval(of_seeds[0])
    return f"{spread([record['numbers']['accuracy'] for record in of_seeds])} ({len(of_seeds)} seeds)"


def _with_interval(record: Record) -> str:
    low, high = record["test"]["intervals"]["accuracy"]
    return f"{record['numbers']['accuracy']:.2f} ({100 * low:.2f} … {100 * high:.2f})"


# The record of each form: the first is table 1's.
_BY_FORM = {form: "lenet5-bayesian-mnist" + ("" if form == "lrt-free" else f"-{form}") for form in FORMS}


def forms_table(records: Records, scale: str) -> ResultTable:
    """LeNet-5 on MNIST by the form of the noise and of σ."""
    rows = []
    for form, (title, _) in FORMS.items():
        record = records.get(_BY_FORM[form])
        if record is not None:
            test = record["test"]
            numbers = [_with_interval(record), f"{test['nll']:.4f}", f"{test['ece']:.4f}"]
            rows.append([title, *numbers, record["parameters"]["needed"], f"{record['seconds'] / 60:.1f}"])
    notes = [
        "Bayesian LeNet-5 on MNIST. σ² = αμ² starts with α = e⁻¹⁰ and has the KL ½Σ log(1 + 1/α), that of a prior "
        "whose variance is fitted to each weight."
    ]
    columns = ["noise and σ", "accuracy %", "NLL", "ECE", "parameters", "min"]
    return ResultTable(f"Noise and form of σ {_BY}", columns, rows, [*notes, *smoke_note(scale)])


def dropout_table(records: Records, scale: str) -> ResultTable:
    """AlexNet on CIFAR-100 beside dropout."""
    rows: list[list[Any]] = []
    for row in compared(scale):
        record = records.get(f"{row.key}-cifar100")
        for draws, numbers in (record or {"numbers": {"by_draws": {}}})["numbers"]["by_draws"].items():
            bayesian = row.kind == "bayesian"
            printed = PRINTED_DROPOUT[f"bayesian-{draws}" if bayesian else row.kind]
            theirs, ours = f"{printed[0]} / {printed[1]}", f"{numbers['train']:.2f} / {numbers['test']:.2f}"
            rows.append([row.title + (f", {draws} draws" if bayesian else ""), theirs, ours])
    notes = [
        "The paper's are of AlexNet. CIFAR-100: accuracy in % on training images (ours: the first 2,000) and on "
        "validation images (ours: the test set). Dropout of one half before the last layer, or the last three, off "
        "when predicting. The paper's draws are those of training, ours those of prediction."
    ]
    columns = ["network", "train / val % paper", "train / test %"]
    return ResultTable(f"Dropout {_BY}", columns, rows, [*notes, *smoke_note(scale)])


def pruning_table(records: Records, scale: str) -> ResultTable:
    """Accuracy after pruning weights of small magnitude, without retraining."""
    rows: list[list[Any]] = []
    for row in (row for row in ROWS if row.kind == "bayesian"):
        for data, title in DATA.items():
            record = records.get(f"{row.key}-{data}")
            if record is None or "pruned" not in record["numbers"]:
                continue
            printed = PRINTED_PRUNED.get(data) if row.network == "alexnet" else None
            pruned = record["numbers"]["pruned"]
            after = [f"{pruned[f'{rate:g}']['accuracy']:.2f}" for rate in RATES]
            rows.append([f"{NETWORKS[row.network]}, {title}", printed, *after])
    notes = [
        "Accuracy in % of the Bayesian networks, whole and without the given fraction of weights (not biases) with the "
        f"smallest |μ|, all with {PRUNED_DRAWS[scale]} draws. Without half of them, about as many parameters are left "
        "as a point estimate has. Not retrained. The paper prunes below a threshold that it does not state."
    ]
    columns = ["network", "pruned paper", *(f"−{100 * rate:g} %" if rate else "whole" for rate in RATES)]
    return ResultTable(f"L1 pruning {_BY}", columns, rows, [*notes, *smoke_note(scale)])


def parameters_table(records: Records, scale: str) -> ResultTable:
    """Parameter counts of each form of weights."""
    rows = []
    for network, title in NETWORKS.items():
        if network in records:
            counts = records[network]["counts"]
            kinds = ("frequentist", "bayesian", "pruned", "relative", "relative-layer")
            rows.append([title, *(f"{counts[kind]['needed']:,}" for kind in kinds)])
    columns = ["network", "frequentist", "Bayesian", "Bayesian, half pruned", "σ² = αμ²", "one α per tensor"]
    notes = [
        f"Parameters needed for prediction, on {'digits' if scale == 'smoke' else 'CIFAR-10'}; pruned: means and σ."
    ]
    return ResultTable(f"Parameters {_BY}", columns, rows, [*notes, *smoke_note(scale)])


def uncertainty_table(records: Records, scale: str) -> ResultTable:
    """Means over the same test images during training, and how well OOD images are detected."""
    rows: list[list[Any]] = []
    absent: list[str] = []
    for data, title in DATA.items():
        record = records.get(f"lenet5-bayesian-{data}")
        if record is None or "uncertainty" not in record:
            continue
        for link in LINKS:
            epochs, found = [epoch[link] for epoch in record["epochs"]], record["uncertainty"][link]
            printed = PRINTED_UNCERTAINTY[data] if link == "softmax" else (None, None)
            cells: list[Any] = []
            for kind, theirs in zip(("aleatoric", "epistemic"), printed, strict=True):
                values = [epoch[kind] for epoch in epochs]
                cells += [theirs, *(f"{value:.4f}" for value in (values[0], max(values), values[-1]))]
            rows.append([f"{title}, {link}", *cells, _detection(found)])
        if record["uncertainty"]["missing"]:
            absent.append(f"{title}: missing files of {', '.join(record['uncertainty']['missing'])}. {_MEASURE_AGAIN}")
    notes = [
        "LeNet-5: traces of the covariances of Kwon et al. (2018), means over the first 2,000 test images with 10 "
        "draws, after the first epoch, at the epoch with the largest mean, and at the end. The paper's numbers are of "
        "the largest probability of one image per batch and cannot be compared. OOD: mean epistemic of all test images "
        "and of out-of-distribution ones, and the AUROC of telling them apart (in brackets that of aleatoric), with "
        f"{DRAWS[scale]} draws."
    ]
    columns = ["data, link"]
    times = (" paper", ", epoch 1", ", largest", ", end")
    columns += [f"{kind}{when}" for kind in ("aleatoric", "epistemic") for when in times]
    return ResultTable(f"Uncertainty {_BY}", [*columns, "OOD"], rows, [*notes, *absent, *smoke_note(scale)])


_MEASURE_AGAIN = (
    "To add them (credo data), delete the network's record and run again: it is measured again, not trained."
)


def _detection(found: dict[str, Any]) -> str | None:
    """In-distribution and OOD means, and the AUROC."""
    told = []
    for name, other in found["foreign"].items():
        areas = other["auroc"]
        means = f"{found['epistemic']:.4f}, {name} {other['epistemic']:.4f}"
        told.append(f"{means}, AUROC {areas['epistemic']:.3f} ({areas['aleatoric']:.3f})")
    return "; ".join(told) or None


def draw_figures(records: Records, scale: str, folder: Path) -> list[Path]:
    """Draw uncertainties over epochs, for the watched networks.

    Args:
        records: Records by job name.
        scale: The preset.
        folder: Folder of the pictures.
    """
    from matplotlib.figure import Figure  # slow to import

    from reproductions.bayesian_cnn.uncertainty_figure import draw_epochs
    from reproductions.picture_files import save_picture

    drawn = []
    for data in DATA:
        record = records.get(f"lenet5-bayesian-{data}")
        if record is None or len(record.get("epochs", ())) < 2:
            continue
        picture = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw_epochs(picture.subplots(), record["epochs"])
        experiment = record["experiment"]
        picture.suptitle(f"{experiment['data']['name']}, {experiment['model']['name']}")
        path = folder / f"uncertainty-{data}.png"
        save_picture(picture, path)
        drawn.append(path)
    return drawn
