"""The tables and the figure of the study of Bayesian CNNs, from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from credo.experiments.reproduce.bayesian_cnn_rows import (
    COMPARED,
    DATA,
    DRAWS,
    FORMS,
    NETWORKS,
    PRINTED,
    PRINTED_DROPOUT,
    PRINTED_PRUNED,
    PRINTED_UNCERTAINTY,
    RATES,
    ROWS,
)
from credo.experiments.reproduce.tables import Table
from credo.experiments.uncertainty import LINKS

Records = dict[str, dict[str, Any]]
_BY = "(Shridhar et al. 2019)"


def accuracy_table(records: Records, scale: str) -> Table:
    """Table 1: accuracies in %, with a 95 % interval over the test images."""
    rows: list[list[Any]] = []
    for row in ROWS:
        found = [records.get(f"{row.key}-{data}") for data in DATA]
        if not any(found):
            continue
        cells: list[Any] = []
        for printed, record in zip(PRINTED[row.key], found, strict=True):
            cells += [printed, None if record is None else _with_interval(record)]
        minutes = sum(record["seconds"] for record in found if record) / 60
        rows.append([row.title, *cells, f"{minutes:.1f}"])
    columns = ["network", *(f"{name}{whose}" for name in DATA.values() for whose in (" paper", "")), "min"]
    notes = [
        "Accuracy in %: the paper's on validation images, ours on the test set with 95 % intervals. One seed. "
        f"Bayesian: {DRAWS[scale]} draws, softplus. min: training of all of a row's networks on one thread."
    ]
    notes += [f"{row.title}: {_describe(record)}" for row in ROWS if (record := _any(records, row.key))]
    return Table(f"Table 1: accuracies {_BY}", columns, rows, [*notes, *_small(scale)])


def _with_interval(record: dict[str, Any]) -> str:
    low, high = record["test"]["intervals"]["accuracy"]
    return f"{record['numbers']['accuracy']:.2f} ({100 * low:.2f} … {100 * high:.2f})"


def _any(records: Records, key: str) -> dict[str, Any] | None:
    return next((records[name] for data in DATA if (name := f"{key}-{data}") in records), None)


def _describe(record: dict[str, Any]) -> str:
    given = record["arguments"]["experiment"]
    options = ", ".join(f"{key} {value}" for key, value in given["method"].items() if key != "name")
    training = ", ".join(
        f"{key} {given['training'][key]}" for key in ("batch_size", "schedule") if key in given["training"]
    )
    return f"{given['method']['name']}, {options}; {training}"


def forms_table(records: Records, scale: str) -> Table:
    """LeNet-5 on MNIST by the form of the noise and of σ."""
    rows = []
    for form, (title, _) in FORMS.items():
        record = records.get("lenet5-bayesian-mnist" + ("" if form == "lrt-free" else f"-{form}"))
        if record is not None:
            test = record["test"]
            numbers = [_with_interval(record), f"{test['nll']:.4f}", f"{test['ece']:.4f}"]
            rows.append([title, *numbers, record["parameters"]["needed"], f"{record['seconds'] / 60:.1f}"])
    notes = [
        "Bayesian LeNet-5 on MNIST. σ² = αμ² begins with α = e⁻¹⁰ and has the KL ½Σ log(1 + 1/α), that of a prior "
        "whose variance is fitted to each weight."
    ]
    columns = ["noise and σ", "accuracy %", "NLL", "ECE", "numbers", "min"]
    return Table(f"Noise and form of σ {_BY}", columns, rows, [*notes, *_small(scale)])


def dropout_table(records: Records, scale: str) -> Table:
    """AlexNet on CIFAR-100 beside dropout."""
    rows: list[list[Any]] = []
    for row in COMPARED:
        record = records.get(f"{row.key}-cifar100")
        for draws, numbers in (record or {"numbers": {"by_draws": {}}})["numbers"]["by_draws"].items():
            bayesian = row.kind == "bayesian"
            printed = PRINTED_DROPOUT[f"bayesian-{draws}" if bayesian else row.kind]
            theirs, ours = f"{printed[0]} / {printed[1]}", f"{numbers['train']:.2f} / {numbers['test']:.2f}"
            rows.append([row.title + (f", {draws} draws" if bayesian else ""), theirs, ours])
    notes = [
        "AlexNet on CIFAR-100: accuracy in % on training images (ours: the first 10,000) and on validation images "
        "(ours: the test set). Dropout of one half before the last layer, or the last three, off when predicting. The "
        "paper's draws are those of training; ours are of prediction."
    ]
    columns = ["network", "train / val % paper", "train / test %"]
    return Table(f"Dropout {_BY}", columns, rows, [*notes, *_small(scale)])


def pruning_table(records: Records, scale: str) -> Table:
    """Accuracy after weights of small magnitude are gone, without training again."""
    rows: list[list[Any]] = []
    for row in (row for row in ROWS if row.kind == "bayesian"):
        for data, title in DATA.items():
            record = records.get(f"{row.key}-{data}")
            if record is None:
                continue
            printed = PRINTED_PRUNED.get(data) if row.network == "alexnet" else None
            pruned = record["numbers"]["pruned"]
            after = [f"{pruned[f'{rate:g}']['accuracy']:.2f}" for rate in RATES]
            rows.append([f"{NETWORKS[row.network]}, {title}", printed, f"{record['numbers']['accuracy']:.2f}", *after])
    notes = [
        "Accuracy in % of the Bayesian networks, whole and without the share of weights (not biases) that has the "
        "smallest |μ|. With half of them gone as many numbers are left as a point estimate has. Not trained again. The "
        "paper prunes below a threshold that it does not state."
    ]
    columns = ["network", "pruned paper", "whole", *(f"−{100 * rate:g} %" for rate in RATES)]
    return Table(f"L1 pruning {_BY}", columns, rows, [*notes, *_small(scale)])


def parameters_table(records: Records, scale: str) -> Table:
    """How many numbers each form of weights needs."""
    rows = []
    for network, title in NETWORKS.items():
        if network in records:
            counts = records[network]["counts"]
            kinds = ("frequentist", "bayesian", "pruned", "relative", "relative-layer")
            rows.append([title, *(f"{counts[kind]['needed']:,}" for kind in kinds)])
    columns = ["network", "frequentist", "Bayesian", "Bayesian, half pruned", "σ² = αμ²", "one α a tensor"]
    notes = [
        f"Numbers that a prediction needs, on {'digits' if scale == 'smoke' else 'CIFAR-10'}; pruned: means and σ."
    ]
    return Table(f"Parameters {_BY}", columns, rows, [*notes, *_small(scale)])


def uncertainty_table(records: Records, scale: str) -> Table:
    """Means over test images, at the first and at the last epoch, and how well foreign images are told."""
    rows: list[list[Any]] = []
    for data, title in DATA.items():
        record = records.get(f"lenet5-bayesian-{data}")
        if record is None or "uncertainty" not in record:
            continue
        for link in LINKS:
            first, found = record["epochs"][0][link], record["uncertainty"][link]
            areas = {name: other["auroc"]["epistemic"] for name, other in found["foreign"].items()}
            printed = PRINTED_UNCERTAINTY[data] if link == "softmax" else (None, None)
            cells: list[Any] = []
            for kind, theirs in zip(("aleatoric", "epistemic"), printed, strict=True):
                cells += [theirs, f"{first[kind]:.4f}", f"{found[kind]:.4f}"]
            told = ", ".join(f"{name} {area:.3f}" for name, area in areas.items()) or None
            rows.append([f"{title}, {link}", *cells, told])
    notes = [
        "LeNet-5: traces of the covariances of Kwon et al. (2018), means over test images, after the first epoch "
        "(2,000 images, 10 draws) and the last. The paper's numbers are of the largest probability of one image a "
        "batch and cannot be compared. AUROC: the image's epistemic uncertainty tells foreign images from test images."
    ]
    columns = ["data, link"]
    columns += [f"{kind}{when}" for kind in ("aleatoric", "epistemic") for when in (" paper", ", epoch 1", ", end")]
    return Table(f"Uncertainty {_BY}", [*columns, "AUROC of epistemic"], rows, [*notes, *_small(scale)])


def _small(scale: str) -> list[str]:
    if scale != "smoke":
        return []
    return ["Scale smoke: digits, a tiny network, two epochs; only shows that the machinery works."]


def draw_figures(records: Records, scale: str, folder: Path) -> list[Path]:
    """Uncertainties over epochs, for the networks that were watched."""
    from matplotlib.figure import Figure  # slow to import, and only a picture needs it

    from credo.experiments.figure_files import save_picture
    from credo.experiments.uncertainty_figure import draw_epochs

    drawn = []
    for data, title in DATA.items():
        record = records.get(f"lenet5-bayesian-{data}")
        if record is None or len(record.get("epochs", ())) < 2:
            continue
        picture = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw_epochs(picture.subplots(), record["epochs"])
        picture.suptitle(f"{title}, LeNet-5")
        path = folder / f"uncertainty-{data}.png"
        save_picture(picture, path)
        drawn.append(path)
    return drawn
