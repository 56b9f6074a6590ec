"""Data sets by name; a new one is one entry in `DATASETS`."""

from __future__ import annotations

import inspect
from pathlib import Path

from credo.core.errors import unknown
from credo.data import sources
from credo.data.array_files import load_arrays
from credo.data.files import DatasetSpec, data_folder, require_files
from credo.data.image_folders import load_images
from credo.data.splits import Dataset
from credo.data.tables.reading import load_csv
from credo.data.toys import load_blobs, load_digits, load_gap, load_moons, load_photo_patches

DATASETS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec("Digits of 8x8 pixels, bundled (Alpaydin and Kaynak, 1998)", "classification", load_digits),
    "moons": DatasetSpec("Two interleaved half circles", "classification", load_moons),
    "blobs": DatasetSpec("Five Gaussian clouds in the plane", "classification", load_blobs),
    "gap": DatasetSpec("A noisy curve with a hole in its training inputs", "regression", load_gap),
    "photo-patches": DatasetSpec(
        "Patches of two bundled photographs: out of distribution for digits", "classification", load_photo_patches
    ),
    "mnist": sources.MNIST,
    "fashion-mnist": sources.FASHION_MNIST,
    "kmnist": sources.KMNIST,
    "notmnist": sources.NOTMNIST,
    "cifar10": sources.CIFAR10,
    "cifar100": sources.CIFAR100,
    "csv": DatasetSpec("Your own table: path=..., target=..., drop=...", "regression", load_csv),
    "arrays": DatasetSpec("Your own .npz or .npy file: path=...", "classification", load_arrays),
    "images": DatasetSpec(
        "Your own images, a folder for each class: path=..., size=...", "classification", load_images
    ),
}


def load_dataset(name: str, *, root: Path | str | None = None, **options: object) -> Dataset:
    """Load a data set into memory; nothing is downloaded.

    Args:
        name: A name in `DATASETS`.
        root: Files are read from `root/name`; by default from `$CREDO_DATA/name` or the user's cache.
        **options: Options of the data set (`n`, `noise`, `seed` of the toys; `path`, `target`, `drop`, ... of `csv`).
    """
    spec = find_spec(name)
    _check_options(name, spec, options)
    if not spec.layouts:
        return spec.load(**options)
    return spec.load(name, _found_folder(name, spec, root), **options)


def require_dataset(name: str, *, root: Path | str | None = None) -> None:
    """Raise `DataMissingError` if files of the data set are missing; none is read."""
    spec = find_spec(name)
    if spec.layouts:
        _found_folder(name, spec, root)


def _found_folder(name: str, spec: DatasetSpec, root: Path | str | None) -> Path:
    folder = data_folder(name, spec, root)
    require_files(name, spec, folder)
    return folder


def dataset_names() -> list[str]:
    """Return the names that `load_dataset` accepts."""
    return list(DATASETS)


def dataset_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options that `load_dataset` takes for that name, with their defaults."""
    parameters = inspect.signature(find_spec(name).load).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def find_spec(name: str) -> DatasetSpec:
    """Return the entry of that name; raise ValueError with the closest one if there is none."""
    if name in DATASETS:
        return DATASETS[name]
    raise ValueError(unknown("data set", name, DATASETS))


def _check_options(name: str, spec: DatasetSpec, options: dict[str, object]) -> None:
    known = dataset_options(name)
    surplus = sorted(set(options) - set(known))
    if surplus:
        possible = f"possible are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"{name} has no option {', '.join(surplus)}: {possible}")
    needed = [one for one, p in known.items() if p.default is p.empty and one not in options]
    if needed:
        raise ValueError(f"{name} needs the option {', '.join(needed)}")
