"""The data sets by name. Adding one is one entry in `DATASETS`."""

from __future__ import annotations

import inspect
from pathlib import Path

from credo.core.errors import unknown
from credo.data import sources
from credo.data.files import DatasetSpec, data_folder, require_files
from credo.data.splits import Dataset
from credo.data.tables.reading import load_csv
from credo.data.toys import load_blobs, load_digits, load_gap, load_moons, load_photo_patches

DATASETS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec("Digits of 8x8 pixels, bundled (Alpaydin and Kaynak, 1998)", "classification", load_digits),
    "moons": DatasetSpec("Two interleaved half circles", "classification", load_moons),
    "blobs": DatasetSpec("Five Gaussian clouds in the plane", "classification", load_blobs),
    "gap": DatasetSpec("A noisy curve with a hole in its training inputs", "regression", load_gap),
    "photo-patches": DatasetSpec(
        "Patches of two bundled photographs: foreign inputs for digits", "classification", load_photo_patches
    ),
    "mnist": sources.MNIST,
    "fashion-mnist": sources.FASHION_MNIST,
    "kmnist": sources.KMNIST,
    "notmnist": sources.NOTMNIST,
    "cifar10": sources.CIFAR10,
    "cifar100": sources.CIFAR100,
    "csv": DatasetSpec("A table of your own: path=..., target=...", "regression", load_csv),
}


def load_dataset(name: str, *, root: Path | str | None = None, **options: object) -> Dataset:
    """A data set in memory.

    `options` belong to the data set (`n`, `noise`, `seed` of the toys; `path`, `target`, ... of `csv`). Files are
    looked for in `root/name`; without `root` in `$CREDO_DATA/name`, then in the user's cache. Nothing is downloaded.
    """
    spec = find_spec(name)
    _check_options(name, spec, options)
    if not spec.layouts:
        return spec.load(**options)
    return spec.load(name, _found_folder(name, spec, root), **options)


def require_dataset(name: str, *, root: Path | str | None = None) -> None:
    """Raise `DataMissingError` if files of the data set are not there; reads none of them."""
    spec = find_spec(name)
    if spec.layouts:
        _found_folder(name, spec, root)


def _found_folder(name: str, spec: DatasetSpec, root: Path | str | None) -> Path:
    folder = data_folder(name, spec, root)
    require_files(name, spec, folder)
    return folder


def dataset_names() -> list[str]:
    """Names that `load_dataset` knows."""
    return list(DATASETS)


def find_spec(name: str) -> DatasetSpec:
    """The entry of that name, or an error with the nearest one."""
    if name in DATASETS:
        return DATASETS[name]
    raise ValueError(unknown("data set", name, DATASETS))


def _check_options(name: str, spec: DatasetSpec, options: dict[str, object]) -> None:
    known = {p.name: p for p in inspect.signature(spec.load).parameters.values() if p.kind is p.KEYWORD_ONLY}
    strangers = sorted(set(options) - set(known))
    if strangers:
        possible = f"possible are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"{name} has no option {', '.join(strangers)}: {possible}")
    needed = [one for one, p in known.items() if p.default is p.empty and one not in options]
    if needed:
        raise ValueError(f"{name} needs the option {', '.join(needed)}")
