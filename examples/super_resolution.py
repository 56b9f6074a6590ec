"""Bayesian super-resolution: ESPCN makes photographs three times larger and marks the pixels it is not sure of.

    python super_resolution.py [FOLDER OF IMAGES] [--quick]

Learns from scikit-learn's two photographs and is tried on matplotlib's; of a folder, every fifth image is held out.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

import credo
from credo.data import Batches, Split
from credo.models import espcn
from credo.models.espcn import enlarged, reduced

UPSCALE, SIDE, STRIDE = 3, 51, 21
parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", type=Path)
parser.add_argument("--quick", action="store_true", help="a few seconds, only to see it run")
given = parser.parse_args()


def luminance(image: Image.Image) -> Tensor:
    """The image as [1, 1, height, width] in [0, 1], cut so that it can be made smaller."""
    pixels = torch.from_numpy(np.array(image.convert("L"))).float().div(255)[None, None]
    height, width = (side - side % UPSCALE for side in pixels.shape[-2:])
    return pixels[..., :height, :width]


def patches(image: Tensor) -> Tensor:
    """Overlapping squares [n, 1, SIDE, SIDE] of an image."""
    return image.unfold(2, SIDE, STRIDE).unfold(3, SIDE, STRIDE).reshape(-1, 1, SIDE, SIDE)


def psnr(image: Tensor, original: Tensor) -> float:
    """Peak signal-to-noise ratio in dB."""
    return -10 * float((image.clamp(0, 1) - original).square().mean().log10())


if given.folder is None:
    known = [luminance(Image.fromarray(pixels)) for pixels in load_sample_images().images]
    unseen = [luminance(Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)))]
else:
    images = [luminance(Image.open(path)) for path in sorted(given.folder.iterdir())]
    known, unseen = [image for i, image in enumerate(images) if i % 5], images[::5]
large = torch.cat([patches(image) for image in known])
large = large[::8] if given.quick else large
train = Split(reduced(large, UPSCALE), large)

network = espcn(UPSCALE, activation="softplus", beta=10.0, residual=True, seed=0)
noise = credo.GaussianNoise(0.05, learn=True)
posterior = credo.BBB(network, data_size=len(train), likelihood=noise, prior=0.1, std_init=1e-3, lr=1e-3)
credo.fit(posterior, Batches(train, batch_size=16), epochs=2 if given.quick else 60, schedule="cosine")

results = []
for original in unseen:
    small = reduced(original, UPSCALE)
    prediction = credo.predict(posterior, small, draws=30)
    bicubic, error = enlarged(small, UPSCALE), (prediction.mean - original).abs()
    doubtful = prediction.epistemic > prediction.epistemic.quantile(0.9)
    results.append((psnr(bicubic, original), psnr(prediction.mean, original)))
    print(f"PSNR bicubic {results[-1][0]:.2f} dB, Bayesian ESPCN {results[-1][1]:.2f} dB")
    print(f"mean error {error.mean():.4f}, of the tenth of pixels with most doubt {error[doubtful].mean():.4f}")

pictures = {"bicubic": bicubic, "mean": prediction.mean, "original": original, "doubt": prediction.epistemic}
figure = Figure(figsize=(12, 3.8), layout="constrained")
for axes, (title, picture) in zip(figure.subplots(1, 4), pictures.items(), strict=True):
    side = min(210, *picture.shape[-2:])
    cut = picture[0, 0, 60 : 60 + side, 160 : 160 + side] if given.folder is None else picture[0, 0, :side, :side]
    axes.imshow(cut.numpy(), cmap="magma" if title == "doubt" else "gray", vmin=0, vmax=None if title == "doubt" else 1)
    axes.set_title(title)
    axes.axis("off")
figure.savefig("super_resolution.png", dpi=80)
