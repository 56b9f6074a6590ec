"""The real files, where CREDO_DATA has them: known labels, balance, and the official digests."""

import os

import pytest

from credo.data import data_root, dataset_status, load_dataset

KNOWN = {  # examples, first training labels, examples a class in the test split
    "mnist": (60_000, [5, 0, 4, 1, 9], None),
    "fashion-mnist": (60_000, [9, 0, 0, 3, 0], 1000),
    "kmnist": (60_000, None, 1000),
    "cifar10": (50_000, [6, 9, 9, 4, 1], 1000),
    "cifar100": (50_000, [19, 29, 0, 11, 1], 100),
    "notmnist": (None, None, 1000),
}


def need(name: str) -> None:
    if not os.environ.get("CREDO_DATA"):
        pytest.skip("CREDO_DATA is not set, so there are no real files to test with")
    if not dataset_status(name).present:
        pytest.skip(f"{data_root()} has no complete {name}")


@pytest.mark.parametrize("name", KNOWN)
def test_known_contents(name):
    need(name)
    size, first, per_class = KNOWN[name]
    dataset = load_dataset(name)
    if size is not None:
        assert len(dataset.train) == size
    if first is not None:
        assert dataset.train.y[:5].tolist() == first
    assert len(dataset.test) == 10_000
    counts = dataset.test.y.bincount(minlength=dataset.classes)
    assert len(counts) == dataset.classes
    if per_class is not None:
        assert counts.tolist() == [per_class] * dataset.classes


@pytest.mark.parametrize("name", KNOWN)
def test_digests(name):
    need(name)
    wrong = [file.path.name for file in dataset_status(name, verify=True).files if file.state == "corrupt"]
    assert wrong == []


def test_cifar10_channel_means_are_the_published_ones():
    need("cifar10")
    pixels = load_dataset("cifar10").train.x
    means = pixels.sum(dim=(0, 2, 3)) / (255 * pixels[:, 0].numel())  # sums of bytes are int64: exact
    assert [round(mean, 4) for mean in means.tolist()] == [0.4914, 0.4822, 0.4465]
