"""Bayesian super-resolution: ESPCN makes photographs three times larger and marks uncertain pixels.

    python super_resolution.py [FOLDER OF IMAGES] [--test FOLDER OF IMAGES] [--seed 0] [--json FILE] [--quick]
        [--out super_resolution.png]

Trains on scikit-learn's two photographs and tests on matplotlib's; of a folder, every fifth image is held out.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import PIL
import torch
from espcn import enlarged, espcn, reduced
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn import functional as F

import credo
from credo.core.support.files import write_json
from credo.data import Batches, Split
from credo.experiments.runs import versions

UPSCALE, SIDE, STRIDE, LARGEST = 3, 51, 21, 639
IMAGES = 400  # of a folder at most: all of them are in memory, a large one with 1.6 MB
HOPPER, SUFFIXES = "grace_hopper.jpg", (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("folder", nargs="?", type=Path, help="images to train on")
parser.add_argument("--test", type=Path, help="test images, instead of every fifth of the other folder")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", type=Path, metavar="FILE", help="where to store all numbers, with seed and versions")
parser.add_argument("--quick", action="store_true", help="about ten seconds: beats bicubic, but by less")
parser.add_argument("--out", type=Path, metavar="FILE", default="super_resolution.png", help="the picture, a PNG file")
given = parser.parse_args()
# At most so many steps and patches: a folder takes no longer than two photographs.
PATCHES, STEPS = 4000, 264 if given.quick else 3960


def luminance(image: Image.Image) -> Tensor:
    """Return the image as [1, 1, height, width] in [0, 1], cropped to a multiple of UPSCALE and to the centre."""
    if min(image.size) < SIDE:
        raise ValueError(f"{image.width}x{image.height} pixels, less than {SIDE}x{SIDE}")
    pixels = gray(image)[None, None]
    height, width = (min(side, LARGEST) // UPSCALE * UPSCALE for side in pixels.shape[-2:])
    top, left = (max(0, side - LARGEST) // 2 for side in pixels.shape[-2:])
    return pixels[..., top : top + height, left : left + width].clone()  # a view would keep the whole image in memory


def gray(image: Image.Image) -> Tensor:
    """Return [height, width] in [0, 1]; raise ValueError if the white level is unknown.

    Pillow itself would clip integers of 16 or 32 bits (modes I) and floats (F) at 255.
    """
    deep = image.mode == "F" or image.mode.startswith("I")
    pixels = torch.from_numpy(np.array(image if deep else image.convert("L"), dtype=np.float32))
    white = 1 if image.mode == "F" else 65535 if deep else 255
    low, high = (float(pixel) for pixel in pixels.aminmax())
    if not 0 <= low <= high <= white:
        raise ValueError(f"its pixels go from {low:g} to {high:g}, in mode {image.mode} 0 to {white} can be used")
    return pixels / white


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced."""
    taken = min(count, most)
    return [index * count // taken for index in range(taken)]


def photographs(folder: Path, least: int) -> dict[str, Tensor]:
    """Load the images of a folder by name; print which are skipped, and exit if fewer than `least` remain."""
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder: give one with images, or none to use the photographs that come along")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if len(paths) > IMAGES:
        print(
            f"{folder} has {len(paths)} images: {IMAGES} of them are taken, evenly spaced in the order of their names"
        )
    found = {}
    for path in (paths[index] for index in evenly(len(paths), IMAGES)):
        try:
            with Image.open(path) as file:
                found[path.name] = luminance(file)
        except (OSError, SyntaxError, ValueError) as error:  # the first two are Pillow's, for broken files
            print(f"{path.name} is left out: {error}")
    if len(found) < least:
        parser.error(
            f"{folder} has {len(found)} images that can be used, at least {least} are needed: add some "
            f"({', '.join(SUFFIXES)}) of {SIDE}x{SIDE} pixels or more, or give another folder"
        )
    return found


def patches(image: Tensor, most: int) -> Tensor:
    """Cut overlapping squares [n, 1, SIDE, SIDE], at most `most`, evenly spaced."""
    squares = image.unfold(2, SIDE, STRIDE).unfold(3, SIDE, STRIDE).reshape(-1, 1, SIDE, SIDE)
    return squares[evenly(len(squares), most)]


def shared_out(images: list[Tensor], most: int) -> Tensor:
    """Cut at most `most` squares, equally many of each image; with more images than that, of some only."""
    chosen = evenly(len(images), most)
    return torch.cat([patches(images[index], most // len(chosen)) for index in chosen])


def varied(squares: Tensor, generator: torch.Generator) -> Tensor:
    """Augment the squares: unchanged, blurred once and three times, each with random contrast and brightness.

    A network trained on sharp images only would also sharpen smooth ones.
    """
    blurred = [squares]
    for _ in range(3):
        blurred.append(F.avg_pool2d(blurred[-1], 3, stride=1, padding=1, count_include_pad=False))
    every = torch.cat([blurred[times] for times in (0, 1, 3)])
    contrast, light = torch.rand(2, len(every), 1, 1, 1, generator=generator)
    contrast = 0.2 + 0.8 * contrast
    return contrast * every + (1 - contrast) * light


def psnr(image: Tensor, original: Tensor) -> float:
    """Peak signal-to-noise ratio in dB."""
    return -10 * float((image.clamp(0, 1) - original).square().mean().log10())


def measured(prediction: credo.RegressionPrediction, bicubic: Tensor, original: Tensor) -> dict[str, float]:
    """Return both PSNRs in dB, the mean absolute error, and that of the 10 % most uncertain pixels."""
    error = (prediction.mean - original).abs()
    doubtful = prediction.epistemic > prediction.epistemic.quantile(0.9)
    psnrs = {"bicubic": psnr(bicubic, original), "bayesian": psnr(prediction.mean, original)}
    return psnrs | {"error": float(error.mean()), "doubtful_error": float(error[doubtful].mean())}


if given.folder is None:
    known = [luminance(Image.fromarray(pixels)) for pixels in load_sample_images().images]
    unseen = {HOPPER: luminance(Image.open(get_sample_data(HOPPER, asfileobj=False)))}
else:
    images = photographs(given.folder, least=1 if given.test else 2)
    held_out = [] if given.test else list(images)[::5]
    known = [image for name, image in images.items() if name not in held_out]
    unseen = {name: images[name] for name in held_out}
unseen = photographs(given.test, least=1) if given.test else unseen
large = varied(shared_out(known, PATCHES // 3), torch.Generator().manual_seed(given.seed))
batches = Batches(Split(reduced(large, UPSCALE), large), batch_size=8 if given.quick else 16, seed=given.seed)

network = espcn(UPSCALE, activation="softplus", beta=10.0, residual=True, seed=given.seed)
noise = credo.GaussianNoise(0.05, learn=True)
posterior = credo.BBB(network, data_size=len(large), likelihood=noise, prior=0.1, init=1e-3, lr=1e-3, seed=given.seed)
schedule = "constant" if given.quick else "cosine"
credo.fit(posterior, batches, epochs=math.ceil(STEPS / len(batches)), schedule=schedule)

results = {}
for name, original in unseen.items():
    small = reduced(original, UPSCALE)
    prediction = credo.predict(posterior, small, draws=30)
    bicubic = enlarged(small, UPSCALE)
    result = results[name] = measured(prediction, bicubic, original)
    print(f"{name}: PSNR bicubic {result['bicubic']:.2f} dB, Bayesian ESPCN {result['bayesian']:.2f} dB")
    print(f"  mean error {result['error']:.4f}, of the 10 % most uncertain pixels {result['doubtful_error']:.4f}")
mean = {key: sum(result[key] for result in results.values()) / len(results) for key in result}
better = sum(result["bayesian"] > result["bicubic"] for result in results.values())
print(f"mean PSNR bicubic {mean['bicubic']:.2f} dB, Bayesian ESPCN {mean['bayesian']:.2f} dB, ", end="")
print(f"better on {better} of {len(results)}")
if given.json:
    record = {key: value and str(value) for key, value in (("folder", given.folder), ("test", given.test))}
    record |= {"seed": given.seed, "quick": given.quick, "steps": posterior.steps}
    record |= {"learned_from": len(known), "squares": len(large)}
    record |= {"images": results, "mean": mean, "better": better}
    write_json(given.json, record | {"versions": versions() | {"pillow": PIL.__version__}})
    print(f"numbers: {given.json}")

pictures = {"bicubic": bicubic, "mean": prediction.mean, "original": original, "uncertainty": prediction.epistemic}
figure = Figure(figsize=(12, 3.8), layout="constrained")
for axes, (title, picture) in zip(figure.subplots(1, 4), pictures.items(), strict=True):
    side, (top, left) = min(210, *picture.shape[-2:]), (60, 160) if name == HOPPER else (0, 0)
    cut = picture[0, 0, top : top + side, left : left + side]
    colours = {"cmap": "magma"} if title == "uncertainty" else {"cmap": "gray", "vmax": 1}
    axes.imshow(cut.numpy(), vmin=0, **colours)
    axes.set_title(title)
    axes.axis("off")
figure.savefig(given.out, dpi=80)
print(f"picture: {given.out}, of {name}" + (f", the last of {len(results)}" if len(results) > 1 else ""))
