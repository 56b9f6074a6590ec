"""The figure of uncertainties: during training, by class, of OOD images, and of a rotated digit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credo.data import Batches, Split, as_float, load_dataset
from credo.methods import BBB
from credo.models import build_model
from credo.training import train
from reproductions.bayesian_cnn.uncertainty import LINKS, class_split, ood_auroc, rotated, snapshot, typical
from reproductions.picture_files import save_picture

# A colour-blind safe palette (Okabe and Ito 2008).
ALEATORIC, EPISTEMIC, ACCURACY = "#0072b2", "#e69f00", "#009e73"
# A sharper softplus than the paper's shortens the plateau of the first epochs.
_SMALL_NET = {"name": "convnet", "channels": [8, 16], "hidden": [32], "beta": 10.0}
# `examples` of the test set, and as many of the training set for its accuracy.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"epochs": 2, "draws": 4, "examples": 100, "angles": 7, "model": {**_SMALL_NET, "channels": [4]}},
    "cpu": {"epochs": 30, "draws": 25, "examples": 2000, "angles": 19, "model": _SMALL_NET},
    "paper": {
        "epochs": 20,
        "draws": 25,
        "examples": 5000,
        "angles": 37,
        "model": {"name": "lenet5"},
        "data": "mnist",
        "ood": ("fashion-mnist", "notmnist"),
        "batch_size": 128,
        "prior": 0.1,
        "temperature": 0.1,
    },
}


@dataclass(frozen=True)
class UncertaintyFigure:
    """The arrays of the figure.

    Args:
        title: Data set and network.
        epochs: The `snapshot` after each epoch.
        by_class: Mean uncertainties by link, kind and class.
        inside: Epistemic uncertainty of the test images.
        outside: Epistemic uncertainty of OOD images, by data set.
        auroc: AUROC of each kind of uncertainty, by link and OOD data set.
        angles: Degrees, [angles].
        images: The rotated digit, [angles, channels, height, width].
        angle_split: Its aleatoric and epistemic uncertainty, [angles] each.
        angle_labels: Its predicted class, [angles].
    """

    title: str
    epochs: list[dict[str, Any]]
    by_class: Mapping[str, Mapping[str, Sequence[float]]]
    inside: Tensor
    outside: Mapping[str, Tensor]
    auroc: Mapping[str, Mapping[str, Mapping[str, float]]]
    angles: Tensor
    images: Tensor
    angle_split: tuple[Tensor, Tensor]
    angle_labels: Tensor


def uncertainty(
    *,
    model: Mapping[str, Any],
    epochs: int,
    draws: int,
    examples: int,
    angles: int,
    data: str = "digits",
    ood: Sequence[str] = ("photo-patches",),
    batch_size: int = 64,
    prior: float = 0.3,
    temperature: float = 0.01,
    seed: int = 0,
) -> UncertaintyFigure:
    """Train a Bayesian CNN with softplus and local reparameterisation, and measure it after every epoch.

    The rotated digit is the 1 of the test set with the highest predicted probability.

    Args:
        model: The network, as options of `build_model`.
        epochs: Epochs of training.
        draws: Weight draws of every measurement.
        examples: Images of every measurement.
        angles: Number of angles between 0 and 180 degrees.
        data: The data set; digits need no files.
        ood: Out-of-distribution data sets.
        batch_size: Images per step.
        prior: Std of the prior. The paper's is 0.1.
        temperature: Weight of the KL. With so few images as of digits, the weights stay at the prior with the paper's
            0.1.
        seed: Seed of weights, batches and draws.
    """
    dataset, outside = load_dataset(data), {name: _first(load_dataset(name).test, examples) for name in ood}
    inputs, classes = list(dataset.input_shape), dataset.classes or 0
    network = build_model(**{**model, "activation": "softplus", "inputs": inputs, "classes": classes, "seed": seed})
    options: dict[str, Any] = {"prior": prior, "temperature": temperature, "init": 0.01, "lr": 2e-3, "seed": seed}
    posterior = BBB(network, data_size=len(dataset.train), noise="lrt", **options)
    seen, test = _first(dataset.train, examples), _first(dataset.test, examples)
    loader = Batches(dataset.train, batch_size=batch_size, seed=seed)
    history = [
        snapshot(posterior, seen, test, draws=draws, seed=seed)
        for _ in train(posterior, loader, epochs=epochs, schedule="constant", seed=seed)
    ]
    splits = {link: class_split(posterior, test.x, link=link, draws=draws, seed=seed) for link in LINKS}
    others = {
        link: {
            name: class_split(posterior, split.x, link=link, draws=draws, seed=seed) for name, split in outside.items()
        }
        for link in LINKS
    }
    softmax = splits["softmax"]
    degrees = torch.linspace(0, 180, angles)
    images = rotated(as_float(test.x[typical(test, softmax, 1)]), degrees)
    by_angle = class_split(posterior, images, draws=draws, seed=seed)
    return UncertaintyFigure(
        f"{data}, {model['name']}",
        history,
        {link: split.by_class(test.y, classes) for link, split in splits.items()},
        softmax.each()[1],
        {name: split.each()[1] for name, split in others["softmax"].items()},
        {link: {name: ood_auroc(splits[link], split) for name, split in others[link].items()} for link in LINKS},
        degrees,
        images,
        by_angle.each(),
        by_angle.labels,
    )


def _first(split: Split, count: int) -> Split:
    return Split(split.x[:count], split.y[:count])


def uncertainty_numbers(figure: UncertaintyFigure) -> dict[str, Any]:
    """Return the numbers of each panel: first and last epoch, by class, AUROC of OOD images, by angle."""
    aleatoric, epistemic = figure.angle_split
    return {
        "training": {"first": figure.epochs[0], "last": figure.epochs[-1]},
        "classes": figure.by_class,
        "foreign": {"images": list(figure.outside), "auroc": figure.auroc},
        "turned": {
            "degrees": figure.angles.tolist(),
            "label": figure.angle_labels.tolist(),
            "aleatoric": aleatoric.tolist(),
            "epistemic": epistemic.tolist(),
        },
    }


def draw_uncertainty(figure: UncertaintyFigure, path: Path) -> None:
    """Write the four panels as PNG, SVG or PDF, by the suffix; the same figure gives the same bytes."""
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "credo", "font.size": 9}):
        picture = Figure(figsize=(10, 7.2), layout="constrained")
        axes = picture.subplots(2, 2)
        draw_epochs(axes[0, 0], figure.epochs)
        _draw_classes(axes[0, 1], figure.by_class["softmax"])
        _draw_ood(axes[1, 0], figure)
        _draw_rotated(axes[1, 1], figure)
        picture.suptitle(figure.title)
        save_picture(picture, path)


def draw_epochs(axes: Any, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Plot uncertainties and training accuracy over epochs.

    Args:
        axes: Axes of matplotlib.
        epochs: The `snapshot` after each epoch.
    """
    at = range(1, len(epochs) + 1)
    for link, dashes in (("softmax", "-"), ("normalised-softplus", ":")):
        for kind, colour in (("aleatoric", ALEATORIC), ("epistemic", EPISTEMIC)):
            values = [epoch[link][kind] for epoch in epochs]
            axes.plot(at, values, dashes, color=colour, label=f"{kind}, {link}")
    axes.set(xlabel="epoch", ylabel="mean uncertainty of test images", yscale="log", title="during training")
    axes.xaxis.get_major_locator().set_params(integer=True)
    other = axes.twinx()
    other.plot(at, [epoch["train_accuracy"] for epoch in epochs], color=ACCURACY, linewidth=1)
    other.set_ylabel("training accuracy", color=ACCURACY)
    axes.legend(frameon=False, fontsize=7, loc="center right")


def _draw_classes(axes: Any, by_class: Mapping[str, Sequence[float]]) -> None:
    at = torch.arange(len(by_class["aleatoric"]))
    axes.bar(at - 0.2, by_class["aleatoric"], 0.4, color=ALEATORIC, label="aleatoric")
    axes.bar(at + 0.2, by_class["epistemic"], 0.4, color=EPISTEMIC, label="epistemic")
    axes.set(xlabel="class", ylabel="mean uncertainty", title="by class, softmax", xticks=at.tolist())
    axes.legend(frameon=False, loc="upper left")


def _draw_ood(axes: Any, figure: UncertaintyFigure) -> None:
    areas = {name: found["epistemic"] for name, found in figure.auroc["softmax"].items()}
    ood = {f"{name}, AUROC {areas[name]:.3f}": values for name, values in figure.outside.items()}
    logs = {label: values.clamp_min(1e-9).log10() for label, values in {"test images": figure.inside, **ood}.items()}
    together = torch.cat(list(logs.values()))
    edges = torch.linspace(float(together.min()), float(together.max()) + 1e-6, 31)
    for (label, values), colour in zip(logs.items(), (ALEATORIC, EPISTEMIC, ACCURACY), strict=False):
        axes.hist(values.numpy(), bins=edges.numpy(), density=True, alpha=0.6, color=colour, label=label)
    axes.set(xlabel="log₁₀ epistemic uncertainty", ylabel="density", title="out-of-distribution images")
    axes.legend(frameon=False, loc="upper right")


def _draw_rotated(axes: Any, figure: UncertaintyFigure) -> None:
    for values, colour, label in zip(
        figure.angle_split, (ALEATORIC, EPISTEMIC), ("aleatoric", "epistemic"), strict=True
    ):
        axes.plot(figure.angles, values, color=colour, marker=".", label=label)
    top = max(float(values.max()) for values in figure.angle_split)
    step = max(1, (len(figure.angles) - 1) // 6)
    for degrees, label, image in list(zip(figure.angles, figure.angle_labels, figure.images, strict=True))[::step]:
        axes.text(float(degrees), 1.34 * top, str(int(label)), ha="center", va="bottom")
        inset = axes.inset_axes((float(degrees) - 11, 1.06 * top, 22, 0.26 * top), transform=axes.transData)
        inset.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
        inset.axis("off")
    axes.set(xlabel="degrees", ylabel="uncertainty", title="a rotated 1 and its predicted class", ylim=(0, 1.5 * top))
    axes.set_xlim(-15, 195)
    axes.legend(frameon=False, loc="center right")
