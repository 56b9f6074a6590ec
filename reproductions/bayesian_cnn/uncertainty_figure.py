"""The figure of uncertainties: while training, by class, of foreign images, and of a digit that turns."""

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
from reproductions.bayesian_cnn.uncertainty import LINKS, class_split, foreign_auroc, snapshot, turned, typical
from reproductions.picture_files import save_picture

# Blue, orange and green differ for every kind of colour vision (Okabe and Ito 2008).
ALEATORIC, EPISTEMIC, ACCURACY = "#0072b2", "#e69f00", "#009e73"
# A sharper softplus than the paper's leaves the plateau of the first epochs sooner.
_SMALL_NET = {"name": "convnet", "channels": [8, 16], "hidden": [32], "beta": 10.0}
# `examples` are those of the test set, and as many of the training set for its accuracy.
UNCERTAINTY_SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"epochs": 3, "draws": 5, "examples": 200, "angles": 7, "model": {**_SMALL_NET, "channels": [4]}},
    "cpu": {"epochs": 30, "draws": 25, "examples": 2000, "angles": 19, "model": _SMALL_NET},
    "paper": {
        "epochs": 20,
        "draws": 25,
        "examples": 5000,
        "angles": 37,
        "model": {"name": "lenet5"},
        "data": "mnist",
        "foreign": ("fashion-mnist", "notmnist"),
        "batch_size": 128,
        "prior": 0.1,
        "temperature": 0.1,
    },
}


@dataclass(frozen=True)
class UncertaintyFigure:
    """What `snapshot` said after each epoch, and of the last one: uncertainties by class, image and angle.

    `inside` and `outside` are the epistemic uncertainty of own and of foreign test images, by data set, and `auroc` how
    well either kind of uncertainty tells these, by link and data set. `images` are the turned digit, [angles, channels,
    h, w]; `angle_split` its aleatoric and epistemic, [angles] each.
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
    foreign: Sequence[str] = ("photo-patches",),
    batch_size: int = 64,
    prior: float = 0.3,
    temperature: float = 0.01,
    seed: int = 0,
) -> UncertaintyFigure:
    """A Bayesian CNN with softplus and local reparameterisation, looked at after every epoch.

    Without data files on scikit-learn's digits, with pieces of its photographs as foreign images. The digit that turns
    is the test set's most surely recognised 1. So few images leave the weights at their prior unless the KL counts less
    than in the paper, whose prior is N(0, 0.1²) and whose temperature is 0.1.
    """
    dataset, strange = load_dataset(data), {name: _first(load_dataset(name).test, examples) for name in foreign}
    inputs, classes = list(dataset.input_shape), dataset.classes or 0
    network = build_model(**{**model, "activation": "softplus", "inputs": inputs, "classes": classes, "seed": seed})
    options: dict[str, Any] = {"prior": prior, "temperature": temperature, "std_init": 0.01, "lr": 2e-3, "seed": seed}
    posterior = BBB(network, data_size=len(dataset.train), noise="lrt", **options)
    seen, test = _first(dataset.train, examples), _first(dataset.test, examples)
    loader = Batches(dataset.train, batch_size=batch_size, seed=seed)
    history = [
        snapshot(posterior, seen, test, draws=draws, seed=seed)
        for _ in train(posterior, loader, epochs=epochs, seed=seed)
    ]
    splits = {link: class_split(posterior, test.x, link=link, draws=draws, seed=seed) for link in LINKS}
    others = {
        link: {
            name: class_split(posterior, split.x, link=link, draws=draws, seed=seed) for name, split in strange.items()
        }
        for link in LINKS
    }
    softmax = splits["softmax"]
    degrees = torch.linspace(0, 180, angles)
    images = turned(as_float(test.x[typical(test, softmax, 1)]), degrees)
    spun = class_split(posterior, images, draws=draws, seed=seed)
    return UncertaintyFigure(
        f"{data}, {model['name']}",
        history,
        {link: split.by_class(test.y, classes) for link, split in splits.items()},
        softmax.each()[1],
        {name: split.each()[1] for name, split in others["softmax"].items()},
        {link: {name: foreign_auroc(splits[link], split) for name, split in others[link].items()} for link in LINKS},
        degrees,
        images,
        spun.each(),
        spun.labels,
    )


def _first(split: Split, count: int) -> Split:
    return Split(split.x[:count], split.y[:count])


def uncertainty_numbers(figure: UncertaintyFigure) -> dict[str, Any]:
    """Numbers of each panel: after the first and the last epoch, by class, AUROC of foreign images, by angle."""
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
    """Write four panels as PNG, SVG or PDF, by the suffix; the same figure gives the same bytes."""
    from matplotlib import rc_context  # slow to import, and only a picture needs it
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "credo", "font.size": 9}):
        picture = Figure(figsize=(10, 7.2), layout="constrained")
        places = picture.subplots(2, 2)
        draw_epochs(places[0, 0], figure.epochs)
        _draw_classes(places[0, 1], figure.by_class["softmax"])
        _draw_foreign(places[1, 0], figure)
        _draw_turned(places[1, 1], figure)
        picture.suptitle(figure.title)
        save_picture(picture, path)


def draw_epochs(place: Any, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Uncertainties and training accuracy over epochs, from what `snapshot` gave after each."""
    at = range(1, len(epochs) + 1)
    for link, dashes in (("softmax", "-"), ("normalised-softplus", ":")):
        for kind, colour in (("aleatoric", ALEATORIC), ("epistemic", EPISTEMIC)):
            values = [epoch[link][kind] for epoch in epochs]
            place.plot(at, values, dashes, color=colour, label=f"{kind}, {link}")
    place.set(xlabel="epoch", ylabel="mean uncertainty of test images", yscale="log", title="while training")
    place.xaxis.get_major_locator().set_params(integer=True)
    other = place.twinx()
    other.plot(at, [epoch["train_accuracy"] for epoch in epochs], color=ACCURACY, linewidth=1)
    other.set_ylabel("training accuracy", color=ACCURACY)
    place.legend(frameon=False, fontsize=7)


def _draw_classes(place: Any, by_class: Mapping[str, Sequence[float]]) -> None:
    at = torch.arange(len(by_class["aleatoric"]))
    place.bar(at - 0.2, by_class["aleatoric"], 0.4, color=ALEATORIC, label="aleatoric")
    place.bar(at + 0.2, by_class["epistemic"], 0.4, color=EPISTEMIC, label="epistemic")
    place.set(xlabel="class", ylabel="mean uncertainty", title="by class, softmax", xticks=at.tolist())
    place.legend(frameon=False)


def _draw_foreign(place: Any, figure: UncertaintyFigure) -> None:
    areas = {name: found["epistemic"] for name, found in figure.auroc["softmax"].items()}
    foreign = {f"{name}, AUROC {areas[name]:.3f}": values for name, values in figure.outside.items()}
    logs = {
        label: values.clamp_min(1e-9).log10() for label, values in {"own test images": figure.inside, **foreign}.items()
    }
    together = torch.cat(list(logs.values()))
    edges = torch.linspace(float(together.min()), float(together.max()) + 1e-6, 31)
    for (label, values), colour in zip(logs.items(), (ALEATORIC, EPISTEMIC, ACCURACY), strict=False):
        place.hist(values.numpy(), bins=edges.numpy(), density=True, alpha=0.6, color=colour, label=label)
    place.set(xlabel="log₁₀ epistemic uncertainty", ylabel="density", title="foreign images")
    place.legend(frameon=False)


def _draw_turned(place: Any, figure: UncertaintyFigure) -> None:
    for values, colour, label in zip(
        figure.angle_split, (ALEATORIC, EPISTEMIC), ("aleatoric", "epistemic"), strict=True
    ):
        place.plot(figure.angles, values, color=colour, marker=".", label=label)
    top = max(float(values.max()) for values in figure.angle_split)
    step = max(1, (len(figure.angles) - 1) // 6)
    for degrees, label, image in list(zip(figure.angles, figure.angle_labels, figure.images, strict=True))[::step]:
        place.text(float(degrees), 1.34 * top, str(int(label)), ha="center", va="bottom")
        inset = place.inset_axes((float(degrees) - 11, 1.06 * top, 22, 0.26 * top), transform=place.transData)
        inset.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
        inset.axis("off")
    place.set(xlabel="degrees", ylabel="uncertainty", title="a turned 1, and what it is taken for", ylim=(0, 1.5 * top))
    place.set_xlim(-15, 195)
    place.legend(frameon=False, loc="center right")
