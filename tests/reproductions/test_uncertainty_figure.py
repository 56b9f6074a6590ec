"""Uncertainties as covariances: against the formula written out, on images that turn, and in the figure."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.data import Split
from reproductions.bayesian_cnn.uncertainty import (
    LINKS,
    ClassSplit,
    class_split,
    normalised_softplus,
    ood_auroc,
    rotated,
    snapshot,
    typical,
)
from reproductions.bayesian_cnn.uncertainty_figure import (
    SCALES,
    UncertaintyFigure,
    uncertainty,
    uncertainty_numbers,
)


def posterior(std: float = 0.5) -> credo.BBB:
    torch.manual_seed(0)
    return credo.BBB(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), data_size=10, init=std)


def networks(one: credo.BBB, x: Tensor, draws: int, seed: int) -> Iterator[Tensor]:
    with torch.no_grad(), one.seeded(seed):
        for _ in range(draws):
            with one.sampled() as net:
                yield net(x).double()


@pytest.mark.parametrize("link", LINKS)
def test_the_formula_of_kwon_et_al(link: str) -> None:
    one, x = posterior(), torch.rand(7, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    found = class_split(one, x, link=link, draws=6, seed=5, batch_size=3)
    outputs = torch.stack(list(networks(one, x, 6, 5)))
    positive = outputs.exp() if link == "softmax" else torch.log(1 + outputs.exp())
    p = positive / positive.sum(-1, keepdim=True)
    mean = p.mean(0)
    for image in range(7):
        aleatoric = torch.stack([torch.diag(q) - torch.outer(q, q) for q in p[:, image]]).mean(0)
        epistemic = torch.stack([torch.outer(q - mean[image], q - mean[image]) for q in p[:, image]]).mean(0)
        torch.testing.assert_close(found.aleatoric[image], aleatoric.diagonal())
        torch.testing.assert_close(found.epistemic[image], epistemic.diagonal())
    torch.testing.assert_close(found.probs, mean)
    # Both together are the covariance of a label drawn from the averaged prediction.
    torch.testing.assert_close(found.aleatoric + found.epistemic, mean * (1 - mean))


@pytest.mark.slow
def test_the_softmax_split_is_that_of_predict() -> None:
    one, x = posterior(), torch.rand(5, 1, 2, 2)
    found, wanted = class_split(one, x, draws=4000, seed=1), credo.predict(one, x, draws=4000, seed=2)
    # Means of 4,000 draws of numbers below ¼ with a spread below 0.1: 0.01 is more than six standard errors.
    torch.testing.assert_close(found.epistemic, wanted.epistemic_by_class.double(), atol=0.01, rtol=0)
    torch.testing.assert_close(found.aleatoric, wanted.aleatoric_by_class.double(), atol=0.01, rtol=0)


def test_copies_of_an_image_in_one_batch_have_the_uncertainty_of_one() -> None:
    """The published program took copies in one pass for draws, and found no uncertainty at all."""
    one, image = posterior(), torch.rand(1, 1, 2, 2)
    alone, copies = class_split(one, image), class_split(one, image.expand(8, 1, 2, 2))
    assert float(alone.epistemic.sum()) > 1e-3
    torch.testing.assert_close(copies.epistemic, alone.epistemic.expand(8, 3))


def test_measuring_changes_nothing() -> None:
    one, x = posterior(), torch.randint(0, 255, (5, 1, 2, 2), dtype=torch.uint8)
    before = one.generator.get_state()
    first = class_split(one, x, draws=3)
    assert torch.equal(one.generator.get_state(), before)
    assert one.training
    assert torch.equal(class_split(one, x.float() / 255, draws=3).probs, first.probs), "bytes are images in [0, 1]"
    with pytest.raises(ValueError, match="Did you mean 'softmax'"):
        class_split(one, x, link="sofmax")


def test_normalised_softplus_also_of_extreme_outputs() -> None:
    p = normalised_softplus(torch.tensor([[1000.0, 3000.0], [-1000.0, -1000.0], [-1000.0, 2.0]]).double())
    assert p.tolist() == [pytest.approx([0.25, 0.75]), pytest.approx([0.5, 0.5]), pytest.approx([0.0, 1.0])]
    outputs = torch.linspace(-40, 40, 81).double().reshape(9, 9)
    positive = torch.log1p(outputs.exp())
    torch.testing.assert_close(
        normalised_softplus(outputs), positive / positive.sum(-1, keepdim=True), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 0}, "draws=0 must be a whole number"),
        ({"draws": 2.5}, "draws=2.5 must be a whole number"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of images"),
        ({"link": None}, "None"),
        ({"x": [[0.0]]}, "a tensor of images .* got BBB and list"),
        ({"posterior": nn.Linear(2, 2)}, "takes a posterior .* got Linear and Tensor"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    one, x = posterior(), torch.zeros(3, 1, 2, 2)
    given = {"posterior": one, "x": x, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        class_split(**given)
    with pytest.raises(ValueError, match=r"labels are \[3\], one for each image, got \[2\]"):
        class_split(one, x).by_class(torch.zeros(2), 3)
    with pytest.raises(ValueError, match=r"one image \[channels, height, width\], got \[3, 1, 2, 2\]"):
        rotated(x, torch.zeros(1))


def test_one_output_per_class_is_required() -> None:
    yes_or_no = credo.BBB(nn.Linear(2, 1), data_size=10, likelihood=credo.Bernoulli())
    with pytest.raises(TypeError, match="likelihood of this posterior is Bernoulli"):
        class_split(yes_or_no, torch.zeros(3, 2))


def split_of(epistemic: list[float]) -> ClassSplit:
    values = torch.tensor(epistemic)[:, None].double()
    return ClassSplit(torch.stack([1 - values[:, 0], values[:, 0]], -1), 2 * values, values)


def test_means_by_class_and_ood_images() -> None:
    own, other = split_of([0.1, 0.2, 0.6]), split_of([0.3, 0.7])
    assert own.means() == pytest.approx({"aleatoric": 0.6, "epistemic": 0.3})
    by_class = own.by_class(torch.tensor([0, 0, 1]), 2)
    assert by_class["epistemic"] == pytest.approx([0.15, 0.6])
    # Of the six pairs, five have the OOD image above.
    assert ood_auroc(own, other) == pytest.approx({"aleatoric": 5 / 6, "epistemic": 5 / 6})
    images = Split(torch.zeros(3, 1, 2, 2), torch.tensor([1, 1, 0]))
    assert typical(images, own, 1) == 1
    with pytest.raises(ValueError, match="no image of class 7"):
        typical(images, own, 7)


def test_a_rotated_image() -> None:
    image = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(0))
    found = rotated(image, torch.tensor([0.0, 90.0, 180.0, 45.0]))
    for quarter in range(3):
        torch.testing.assert_close(found[quarter], torch.rot90(image, quarter, (1, 2)), atol=1e-5, rtol=0)
    assert float(found[3, 0, 0, 0]) < 1e-6, "black comes in at the corners"


def test_a_snapshot_counts_right_answers() -> None:
    one = posterior(std=1e-6)
    x = torch.rand(20, 1, 2, 2, generator=torch.Generator().manual_seed(3))
    labels = one.model(x).argmax(-1)
    wrong = torch.where(torch.arange(20) < 5, (labels + 1) % 3, labels)
    found = snapshot(one, Split(x, labels), Split(x, wrong), draws=2)
    assert (found["train_accuracy"], found["accuracy"]) == (1.0, 0.75)
    assert found["softmax"]["epistemic"] < 1e-9  # type: ignore[index]


@pytest.fixture(scope="module")
def figure() -> UncertaintyFigure:
    # Digits are not learned in three epochs; with these, the networks come to agree again.
    return uncertainty(**{**SCALES["smoke"], "epochs": 24, "ood": ("photo-patches", "digits")})


@pytest.mark.slow
def test_uncertainty_falls_while_digits_are_learned(figure: UncertaintyFigure) -> None:
    first, last = figure.epochs[0], figure.epochs[-1]
    assert last["accuracy"] > 0.8 > first["accuracy"]
    assert last["softmax"]["aleatoric"] < 0.5 * first["softmax"]["aleatoric"]
    uncertainties = [epoch["softmax"]["epistemic"] for epoch in figure.epochs]
    # It begins low, before anything is learned, rises, and falls again.
    assert uncertainties[0] < 0.1 * max(uncertainties)
    assert sum(uncertainties[-3:]) / 3 < 0.85 * max(uncertainties)
    assert last["softmax"]["aleatoric"] < last["normalised-softplus"]["aleatoric"]


@pytest.mark.slow
def test_the_numbers_are_those_of_the_arrays(figure: UncertaintyFigure) -> None:
    numbers = json.loads(json.dumps(uncertainty_numbers(figure)))
    assert set(numbers) == {"training", "classes", "foreign", "turned"}
    assert numbers["foreign"]["images"] == ["photo-patches", "digits"]
    for name, outside in figure.outside.items():
        pairs = [(o > i) + 0.5 * (o == i) for o in outside.tolist() for i in figure.inside.tolist()]
        assert numbers["foreign"]["auroc"]["softmax"][name]["epistemic"] == pytest.approx(sum(pairs) / len(pairs))
    assert len(numbers["classes"]["softmax"]["epistemic"]) == 10
    assert numbers["turned"]["degrees"][-1] == 180
    assert len(figure.images) == len(numbers["turned"]["label"]) == 7


@pytest.mark.slow
def test_the_picture_is_the_same_bytes_each_time(figure: UncertaintyFigure, tmp_path: Path) -> None:
    from reproductions.bayesian_cnn.uncertainty_figure import draw_uncertainty

    for name in ("a.svg", "b.svg", "c.png"):
        draw_uncertainty(figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(text in drawn for text in ("epistemic", "photo-patches, AUROC", "digits, AUROC 0.500"))
