"""Aleatoric and epistemic uncertainty of class predictions as covariances (Kwon et al. 2018), class by class.

As Shridhar et al. (2019) use them: with softmax or normalised softplus, during training, on out-of-distribution images
and on a rotated digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.likelihood import Categorical
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.core.support.validate import checked_count
from credo.data import Split, as_float
from credo.evaluate.detection import auroc

_LINEAR_BELOW = -15.0


def normalised_softplus(outputs: Tensor) -> Tensor:
    """softplus(f)/Σ softplus(f) over the last dimension."""
    # In log space, with softplus(f) = e^f for very negative f: the sum would underflow.
    logs = torch.where(outputs < _LINEAR_BELOW, outputs, F.softplus(outputs.clamp_min(_LINEAR_BELOW)).log())
    return logs.softmax(-1)


LINKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "normalised-softplus": normalised_softplus,
}


@dataclass(frozen=True)
class ClassSplit:
    """Mean probabilities and the diagonals of both covariances, each [n, classes] in float64."""

    probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def labels(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(-1)

    def each(self) -> tuple[Tensor, Tensor]:
        """Aleatoric and epistemic uncertainty of each image [n]: the traces of its covariances."""
        return self.aleatoric.sum(-1), self.epistemic.sum(-1)

    def means(self) -> dict[str, float]:
        """Means of the traces over images."""
        aleatoric, epistemic = self.each()
        return {"aleatoric": float(aleatoric.mean()), "epistemic": float(epistemic.mean())}

    def by_class(self, labels: Tensor, classes: int) -> dict[str, list[float]]:
        """Means of the traces over the images of each class; NaN for a class that has none."""
        if labels.shape != self.probs.shape[:1]:
            raise ValueError(f"labels are [{len(self.probs)}], one for each image, got {list(labels.shape)}.")
        found = {}
        for name, values in zip(("aleatoric", "epistemic"), self.each(), strict=True):
            found[name] = [float(values[labels == k].mean()) for k in range(classes)]
        return found


def _covariance_by_class(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonals of the aleatoric and epistemic covariance, each [batch, classes], from [draws, batch, classes]."""
    mean = probs.mean(0)
    return mean - probs.square().mean(0), (probs - mean).square().mean(0)


@torch.no_grad()
def class_split(
    posterior: Posterior, x: Tensor, *, link: str = "softmax", draws: int = 25, seed: int = 0, batch_size: int = 500
) -> ClassSplit:
    """Split the predictive covariance of images into aleatoric and epistemic parts, with the same draws for all images.

    Args:
        posterior: A posterior with a categorical likelihood.
        x: Images, bytes or floats.
        link: A key of `LINKS`, from outputs to probabilities.
        draws: Number of weight draws.
        seed: Seed of the draws.
        batch_size: Images per pass.
    """
    if link not in LINKS:
        raise ValueError(unknown("link", str(link), LINKS))
    draws, batch_size = checked_count("draws", draws), checked_count("batch_size", batch_size, what="images")
    if not isinstance(posterior, Posterior) or not isinstance(x, Tensor):
        kinds = f"{type(posterior).__name__} and {type(x).__name__}"
        raise TypeError(f"class_split takes a posterior and a tensor of images [n, …], got {kinds}.")
    if not isinstance(posterior.likelihood, Categorical):
        raise TypeError(
            "class_split needs one output per class; the likelihood of this posterior is "
            f"{type(posterior.likelihood).__name__}. Use predict(...).uncertainty('covariance') instead."
        )
    parts = []
    with evaluating(posterior, seed) as frozen:
        for batch in x.split(batch_size):
            inputs, singles = as_float(batch).to(frozen.device), []
            with frozen.seeded(seed):
                for draw in frozen.iter_draws(frozen.whole_draws(draws)):
                    with frozen.sampled(draw) as net:
                        singles.append(LINKS[link](net(inputs.clone()).double()))
            probs = torch.stack(singles).cpu()
            parts.append((probs.mean(0), *_covariance_by_class(probs)))
    return ClassSplit(*(torch.cat(part) for part in zip(*parts, strict=True)))


def snapshot(posterior: Posterior, train: Split, test: Split, *, draws: int, seed: int = 0) -> dict[str, object]:
    """Measure accuracy on training and test images, and mean uncertainties on the test images with both links.

    Args:
        posterior: The posterior.
        train: Training images.
        test: Test images.
        draws: Number of weight draws.
        seed: Seed of the draws.
    """
    found: dict[str, object] = {}
    for name, split in (("train_accuracy", train), ("accuracy", test)):
        guessed = class_split(posterior, split.x, draws=draws, seed=seed).labels
        found[name] = float((guessed == split.y.cpu()).double().mean())
    for link in LINKS:
        found[link] = class_split(posterior, test.x, link=link, draws=draws, seed=seed).means()
    return found


def ood_auroc(inside: ClassSplit, outside: ClassSplit) -> dict[str, float]:
    """AUROC of each uncertainty as a score for out-of-distribution images.

    Args:
        inside: In-distribution images.
        outside: Out-of-distribution images.
    """
    names = ("aleatoric", "epistemic")
    return {name: auroc(out, own) for name, own, out in zip(names, inside.each(), outside.each(), strict=True)}


def rotated(image: Tensor, degrees: Tensor) -> Tensor:
    """Rotate an image counter-clockwise by each angle, with black in the corners.

    Args:
        image: [channels, height, width].
        degrees: [angles].

    Returns:
        [angles, channels, height, width].
    """
    if image.dim() != 3:
        raise ValueError(f"rotated takes one image [channels, height, width], got {list(image.shape)}.")
    angles = degrees.to(torch.get_default_dtype()) * (math.pi / 180)
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # The grid holds the source of each output pixel; rows go down, so this is the inverse rotation.
    matrices = torch.stack([torch.stack([cos, -sin, zero], -1), torch.stack([sin, cos, zero], -1)], -2)
    images = as_float(image)[None].expand(len(angles), *image.shape)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def typical(split: Split, found: ClassSplit, label: int) -> int:
    """Return the index of the image of a class with the highest probability of that class."""
    chosen = (split.y.cpu() == label).nonzero().flatten()
    if len(chosen) == 0:
        raise ValueError(f"There is no image of class {label}.")
    return int(chosen[found.probs[chosen, label].argmax()])
