"""Small data sets without files: bundled digits, two-dimensional classes, a regression curve with a gap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credo.core.support.extras import needs
from credo.data.splits import Dataset, Split, split_validation

BLOB_CENTRES = 5
GAP_SPAN = 2.0  # inputs lie in [-GAP_SPAN, GAP_SPAN]
GAP_HALF_WIDTH = 0.7  # and no training input in (-GAP_HALF_WIDTH, GAP_HALF_WIDTH)


def load_digits() -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits, `float32 [n, 1, 8, 8]` in [0, 1].

    The 80/20 split is stratified and fixed. These are the test images of Alpaydin and Kaynak (1998), so accuracies are
    not comparable with MNIST.
    """
    with needs("sklearn", "The data set digits"):
        from sklearn import datasets  # slow to import

    bunch = datasets.load_digits()
    x = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)  # pixels are 0 to 16
    y = torch.from_numpy(bunch.target).long()
    return Dataset("digits", *split_validation(Split(x, y), size=0.2, seed=0, stratify=True), classes=10)


def load_moons(*, n: int = 500, noise: float = 0.1, seed: int = 0) -> Dataset:
    """Make two interleaved half circles of radius 1. Classes alternate, so any leading slice is balanced.

    Args:
        n: Number of training points, and of test points.
        noise: Standard deviation of the points.
        seed: Seed of the points.
    """
    _check(n, noise)
    generator = torch.Generator().manual_seed(seed)
    return Dataset("moons", _moons(n, noise, generator), _moons(n, noise, generator), classes=2)


def load_blobs(*, n: int = 500, noise: float = 0.7, seed: int = 0) -> Dataset:
    """Make five Gaussian clusters with fixed centres on a circle of radius 3.

    The best possible classifier is the nearest centre.

    Args:
        n: Number of training points, and of test points.
        noise: Standard deviation of a cluster.
        seed: Seed of the points.
    """
    _check(n, noise)
    generator = torch.Generator().manual_seed(seed)
    return Dataset("blobs", _blobs(n, noise, generator), _blobs(n, noise, generator), classes=BLOB_CENTRES)


def load_gap(*, n: int = 200, noise: float = 0.1, seed: int = 0) -> Dataset:
    """Make a regression with a gap in the training inputs; the test inputs cover everything.

    `y = gap_mean(x) + noise * normal`: the noise is known, the rest of the predictive std is epistemic and should grow
    inside the gap. Targets are not standardised.

    Args:
        n: Number of training points, and of test points.
        noise: Standard deviation of the targets.
        seed: Seed of the points.
    """
    _check(n, noise)
    generator = torch.Generator().manual_seed(seed)
    side = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 2 - 1
    edge = torch.where(side < 0, -GAP_HALF_WIDTH, GAP_HALF_WIDTH)
    train_x = edge + side * (GAP_SPAN - GAP_HALF_WIDTH)
    test_x = torch.linspace(-GAP_SPAN, GAP_SPAN, n, dtype=torch.float64).unsqueeze(1)
    return Dataset("gap", _gap(train_x, noise, generator), _gap(test_x, noise, generator), classes=None)


def gap_mean(x: Tensor) -> Tensor:
    """Return the curve of `gap` without noise."""
    return torch.sin(3 * x) + x / 3


def _gap(x: Tensor, noise: float, generator: torch.Generator) -> Split:
    return Split(x.float(), (gap_mean(x) + noise * _normal(x.shape, generator)).float())


def _moons(n: int, noise: float, generator: torch.Generator) -> Split:
    y = torch.arange(n) % 2
    angle = torch.rand(n, generator=generator, dtype=torch.float64) * math.pi
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    x = torch.where(y[:, None] == 0, upper, lower)
    return Split((x + noise * _normal(x.shape, generator)).float(), y)


def _blobs(n: int, noise: float, generator: torch.Generator) -> Split:
    y = torch.arange(n) % BLOB_CENTRES
    x = blob_centres()[y].double()
    return Split((x + noise * _normal(x.shape, generator)).float(), y)


def blob_centres() -> Tensor:
    """Return the centres of `blobs`, [5, 2]."""
    angle = torch.arange(BLOB_CENTRES, dtype=torch.float64) * (2 * math.pi / BLOB_CENTRES)
    return 3 * torch.stack([angle.cos(), angle.sin()], dim=1).float()


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _check(n: int, noise: float) -> None:
    if n < 1:
        raise ValueError(f"n={n}: at least one example is needed")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise={noise}: a standard deviation is finite and not negative")


def load_photo_patches(*, n: int = 1000, size: int = 8, seed: int = 0) -> Dataset:
    """Cut grey patches `float32 [n, 1, size, size]` in [0, 1] from two bundled photographs.

    The out-of-distribution set for `digits`. Labels are the photograph's index; the training split is empty.

    Args:
        n: Number of patches.
        size: Pixels per side.
        seed: Seed of the positions.
    """
    _check(n, 0.0)
    with needs("sklearn", "The data set photo-patches"):
        from sklearn import datasets

    generator = torch.Generator().manual_seed(seed)
    photos = [
        torch.tensor(image, dtype=torch.float32).mean(-1).div(255) for image in datasets.load_sample_images().images
    ]
    label = torch.randint(len(photos), (n,), generator=generator)
    patches = torch.empty(n, 1, size, size)
    for index, photo in enumerate(photos):
        mine = (label == index).nonzero().squeeze(1)
        top = torch.randint(photo.shape[0] - size, (len(mine),), generator=generator)
        left = torch.randint(photo.shape[1] - size, (len(mine),), generator=generator)
        offset = torch.arange(size)
        rows, columns = (top[:, None] + offset)[:, :, None], (left[:, None] + offset)[:, None, :]
        patches[mine, 0] = photo[rows, columns]
    nothing = Split(patches[:0], label[:0])
    return Dataset("photo-patches", nothing, Split(patches, label), classes=len(photos))
