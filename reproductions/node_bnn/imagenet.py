"""ResNet-50 made Bayesian on folders of images: ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG, as of ImageNet.

Images are read from disk as they are needed. The jobs are those on CIFAR-10, without MC-dropout and the ensemble.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.core.description import parameter_counts
from credo.core.errors import unknown
from credo.data.errors import DataMissingError
from credo.experiments.runs import versions
from credo.methods import MAP, NodeBNN
from credo.models import build_model, load_named_weights
from credo.predict import predict_classes
from credo.training import train
from reproductions.jobs import Job, Record
from reproductions.node_bnn.rows import COMPONENTS, NODE_RATE
from reproductions.node_bnn.train import cross_scaled, scores

WEIGHTS = ("resnet50.safetensors", "resnet50.pth")
_IMAGES = {".jpeg", ".jpg", ".png"}
_THREADS = 8
# Trinh et al. (2020), their branch for ImageNet, except for the nodes' optimiser: its learning rate is not published,
# and that of their other networks, with momentum, destroyed trained networks of ours in the first steps. Untested on
# ImageNet itself.
_METHOD = {
    "nodes": {"side": "in", "bias_scale": True},
    "kl_term": "mean",
    "prior": 0.1,
    "init": {"spread": 0.5, "std": 0.05},
    "optimizer": {
        "name": "sgd",
        "nodes": {"momentum": 0.0, "nesterov": False},
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
    },
}
_RATE = 5e-4
# Sides of the crop and of the image before it, channels of the first stage (`width`), whether weights are required.
_SCALES: dict[str, dict[str, Any]] = {
    "paper": {"epochs": 15, "batch_size": 1280, "crop": 224, "resize": 256, "width": 64, "draws": 2, "weights": True},
    "cpu": {"epochs": 1, "batch_size": 128, "crop": 224, "resize": 256, "width": 64, "draws": 1, "weights": True},
    "smoke": {"epochs": 1, "batch_size": 4, "crop": 64, "resize": 72, "width": 4, "draws": 1, "weights": False},
}
# Random weights, with running statistics of a few batches, do not tolerate the noise that trained weights do.
_SMOKE = {"init": {"spread": 0.05, "std": 0.05}, "lr": {"nodes.*": 0.01, "*": _RATE}}
ROWS = {f"resnet50-{variant}": variant for variant in ("sgd", *(f"ibnn-{count}" for count in COMPONENTS))}


class FolderImages:
    """The image files of a folder with one subfolder per class, in alphabetical order.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        found = sorted(path for path in folder.glob("*") if path.is_dir())
        self.class_names = [path.name for path in found]
        files = [(file, label) for label, path in enumerate(found) for file in sorted(path.iterdir())]
        self.files = [(file, label) for file, label in files if file.suffix.lower() in _IMAGES]
        if not self.files:
            raise DataMissingError(
                f"{folder} holds no images. ImageNet's layout is ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG, "
                "the validation images in folders by class, too; give --root ROOT."
            )
        empty = sorted(set(range(len(found))) - {label for _, label in self.files})
        if empty:
            names = ", ".join(self.class_names[label] for label in empty[:5])
            raise DataMissingError(f"{folder} has classes without images ({len(empty)}): {names}. Fill or remove them.")

    def __len__(self) -> int:
        return len(self.files)


class FolderBatches:
    """Batches (x float32 in [0, 1], y) of image files; order and crops depend only on seed and epoch.

    Args:
        images: The files.
        batch_size: Images per batch.
        crop: Side of the images in pixels.
        resize: Side of the image that the centre is cropped from.
        seed: For training: a random crop of 8 to 100 % of the area, mirrored half of the time. None: the centre, in
            order.
    """

    def __init__(self, images: FolderImages, *, batch_size: int, crop: int, resize: int, seed: int | None) -> None:
        self.images, self.batch_size, self.crop, self.resize, self.seed = images, batch_size, crop, resize, seed
        self.epoch = 0

    @property
    def data_size(self) -> int:
        """Number of images."""
        return len(self.images)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = torch.arange(len(self.images))
        if self.seed is not None:
            order = torch.randperm(len(order), generator=_generator(self.seed, epoch, "order"))
        with ThreadPoolExecutor(_THREADS) as pool:
            for rows in order.split(self.batch_size):
                chosen = [self.images.files[row] for row in rows.tolist()]
                read = pool.map(lambda index, file: self._read(file[0], epoch, index), rows.tolist(), chosen)
                yield torch.stack(list(read)), torch.tensor([label for _, label in chosen])

    def _read(self, path: Path, epoch: int, index: int) -> Tensor:
        from PIL import Image  # slow to import, and only images from files need it

        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except OSError as error:  # truncated, or no image: a million files include some
            raise ValueError(f"{path} cannot be read as an image ({error}): replace or remove it.") from error
        if self.seed is None:
            box, mirrored = centre_box(image.size, self.crop / self.resize), False
        else:
            box, mirrored = random_box(image.size, _generator(self.seed, epoch, f"crop {index}"))
        image = image.resize((self.crop, self.crop), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 255
        return pixels.flip(-1) if mirrored else pixels


def centre_box(size: tuple[int, int], fraction: float) -> tuple[float, float, float, float]:
    """Return the central square whose side is this fraction of the shorter side."""
    side = fraction * min(size)
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side


def random_box(size: tuple[int, int], generator: torch.Generator) -> tuple[tuple[float, float, float, float], bool]:
    """Draw a crop of 8 to 100 % of the area, 3:4 to 4:3, and whether to mirror it; the centre if none fits in ten."""
    area = size[0] * size[1]
    mirrored = bool(torch.rand((), generator=generator) < 0.5)
    for _ in range(10):
        fraction, shape, right, down = torch.rand(4, generator=generator).tolist()
        wanted, ratio = area * (0.08 + 0.92 * fraction), (3 / 4) * (16 / 9) ** shape
        width, height = (wanted * ratio) ** 0.5, (wanted / ratio) ** 0.5
        if width <= size[0] and height <= size[1]:
            left, top = right * (size[0] - width), down * (size[1] - height)
            return (left, top, left + width, top + height), mirrored
    return centre_box(size, 1.0), mirrored


def jobs(scale: str, rows: tuple[str, ...], root: str | None) -> list[Job]:
    """SGD's weights and every number of components.

    Args:
        scale: The preset.
        rows: Keys of `ROWS`; all by default.
        root: Folder with train/, val/ and the weights.
    """
    if root is None:
        raise ValueError("--data imagenet needs --root, the folder with train/ and val/.")
    for row in rows:
        if row not in ROWS:
            raise ValueError(unknown("row", row, ROWS))
    about = {"network": "resnet50", "root": str(Path(root).resolve()), **_SCALES[scale]}
    chosen = {name: v for name, v in ROWS.items() if not rows or name in rows}
    return [Job(name, {**about, "variant": v, "method": _method(v, _SCALES[scale])}) for name, v in chosen.items()]


def _method(variant: str, about: dict[str, Any]) -> dict[str, Any]:
    """Options of `NodeBNN`; none for the unchanged weights."""
    if variant == "sgd":
        return {}
    components = int(variant.removeprefix("ibnn-"))
    options = {
        **_METHOD,
        "components": components,
        "lr": {"nodes.*": NODE_RATE / components, "*": _RATE},
        "draws": about["draws"],
    }
    return options | ({} if about["weights"] else _SMOKE)


def notes(scale: str) -> list[str]:
    """Describe the rows, below their table."""
    about = _SCALES[scale]
    spent = f"{about['epochs']} epoch{'s' if about['epochs'] > 1 else ''} of batches of {about['batch_size']}"
    start = "torchvision's weights" if about["weights"] else "random weights"
    found = [
        f"Paper: ResNet-50 on ImageNet. Ours: ResNet-50 on the folder's images, at {about['crop']} pixels, measured on "
        f"val. SGD: {start}, unchanged. iBNN: fine-tuned from them for {spent}."
    ]
    if scale == "smoke":
        found.append("Preset smoke: few channels, random weights; only shows that the pipeline works.")
    return found


def tune_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Fine-tune one row, with a checkpoint after every epoch, and measure it on `val`."""
    root, variant = Path(arguments["root"]), arguments["variant"]
    sizes = {key: arguments[key] for key in ("batch_size", "crop", "resize")}
    training = FolderBatches(FolderImages(root / "train"), **sizes, seed=0)
    test = FolderBatches(FolderImages(root / "val"), **sizes, seed=None)
    if test.images.class_names != training.images.class_names:
        odd = sorted(set(test.images.class_names) ^ set(training.images.class_names))
        raise ValueError(f"{root}/val has other classes than {root}/train ({len(odd)}): {', '.join(odd[:5])}.")
    count = len(training.images.class_names)
    inputs = (3, arguments["crop"], arguments["crop"])
    model = build_model("resnet50", inputs=inputs, classes=count, width=arguments["width"], seed=0)
    if arguments["weights"]:
        load_named_weights(model, _weights(root))
    options = arguments["method"]
    components = options.get("components", 1)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    posterior = (NodeBNN if options else MAP)(model, data_size=len(training.images), **options)
    seconds = 0.0
    if variant != "sgd":
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "checkpoint.pt"
        seconds = sum(r.seconds for r in train(posterior, training, epochs=arguments["epochs"], checkpoint=path))
    prediction = predict_classes(posterior, test, draws=components)
    numbers = {str(components): scores(prediction.probs, prediction.targets)}
    if variant == "sgd":
        numbers["scaled"] = scores(cross_scaled(prediction.probs, prediction.targets), prediction.targets)
    counts = {**parameter_counts(posterior), "nodes": posterior.describe().spread_count}
    about = {"network": "resnet50", "variant": variant, "seed": 0, "seconds": seconds}
    return {**about, "parameters": counts, "numbers": numbers, "versions": versions()}


def _weights(root: Path) -> Path:
    path = next((root / name for name in WEIGHTS if (root / name).exists()), None)
    if path is None:
        raise DataMissingError(f"Put torchvision's weights of ResNet-50 into {root} as {' or '.join(WEIGHTS)}.")
    return path


def _generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {epoch} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
