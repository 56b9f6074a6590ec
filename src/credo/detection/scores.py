"""Out-of-distribution scores of logits and features: pure functions of arrays, larger for more unusual inputs.

Features φ are the inputs of a network's last linear layer, logits f its outputs. A score that compares with training
data is fitted to their features once: `Knn.fit(...)` and so on, whose tensors are all that has to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.evaluate.checks import check_labels

# Numbers of a table of distances that exist at once, in float64: 64 MB.
_CHUNK = 2**23
# The neighbour that counts where there are 1,000 training examples or more.
_NEIGHBOUR = 50
# Directions whose variance is below this fraction of the largest one are rounding errors of float32 features.
_NO_VARIANCE = 1e-10


@dataclass(frozen=True)
class Training:
    """What scores are fitted to: one row for each training example.

    Attributes:
        features: φ, [n, features].
        logits: f, [n, classes]; None for a regression.
        labels: Class indices [n]; None if unknown.
        weight: Weight of the last linear layer, [classes, features], if the logits are its outputs.
        bias: Its bias [classes], if it has one.
    """

    features: Tensor
    logits: Tensor | None = None
    labels: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class FittedScore(Protocol):
    """A score that was fitted: a dataclass of tensors and numbers."""

    def __call__(self, features: Tensor, logits: Tensor | None = None) -> Tensor:
        """Scores [n] of features [n, features] and logits [n, classes]; larger means more unusual."""


def energy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """−T·log Σ exp(f/T), the energy of Liu et al. (2020), [n].

    Args:
        logits: f, [n, classes].
        temperature: T.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive.")
    return -temperature * (_table(logits, "logits") / temperature).logsumexp(-1)


def max_logit(logits: Tensor) -> Tensor:
    """Minus the largest logit (Hendrycks et al. 2022), [n].

    Args:
        logits: f, [n, classes].
    """
    return -_table(logits, "logits").amax(-1)


@dataclass(frozen=True)
class Knn:
    """Distance to the k-th nearest training example, all features scaled to length 1 (Sun et al. 2022).

    Attributes:
        bank: Training features of length 1, [n, features].
        k: Which neighbour.
    """

    bank: Tensor
    k: int

    @classmethod
    def fit(cls, training: Training, *, k: int | None = None) -> Self:
        """Keep the training features.

        Args:
            training: Features of training examples; classes are not needed.
            k: Which neighbour counts; None: as in `OodDetector`.
        """
        rows = len(_table(training.features, "features"))
        k = min(_NEIGHBOUR, rows // 20 + 1) if k is None else k
        if not 1 <= k <= rows:
            raise ValueError(f"k={k} with {rows} training examples: give a k from 1 to {rows}.")
        return cls(F.normalize(training.features.detach(), dim=-1), k)

    def __call__(self, features: Tensor, logits: Tensor | None = None) -> Tensor:
        """Distances [n], each from 0 to 2; `logits` are not used."""
        given = F.normalize(_matching(features, self.bank).double(), dim=-1)
        # ‖a − b‖² = 2 − 2ab; of near neighbours, in float32, that would be rounding errors alone.
        bank = F.normalize(self.bank.to(given), dim=-1).T
        size = max(1, _CHUNK // bank.shape[1])
        nearest = [(rows @ bank).topk(self.k, -1).values[:, -1] for rows in given.split(size)]
        return (2 - 2 * torch.cat(nearest)).clamp_min(0).sqrt().to(features.dtype)


@dataclass(frozen=True)
class Mahalanobis:
    """Smallest squared Mahalanobis distance to a class mean, all classes with one covariance (Lee et al. 2018).

    The relative one (Ren et al. 2021) subtracts the squared distance under one Gaussian of all training features.

    Attributes:
        means: Class means [classes, features].
        root: A with AAᵀ the pseudo-inverse of the covariance within classes, [features, directions].
        centre: Mean of all features [1, features], and
        background: root of the pseudo-inverse of their covariance; without any directions if not relative.
    """

    means: Tensor
    root: Tensor
    centre: Tensor
    background: Tensor

    @classmethod
    def fit(cls, training: Training, *, relative: bool = False) -> Self:
        """Find the class means and the covariance.

        Args:
            training: Features and labels of training examples.
            relative: Subtract the distance under one Gaussian of all features.
        """
        features = _table(training.features, "features").double()
        if training.labels is None:
            raise ValueError("Mahalanobis scores need the labels of the training examples: give (inputs, labels).")
        classes = int(training.labels.max()) + 1 if training.logits is None else training.logits.shape[-1]
        labels = check_labels(training.labels, batch=len(features), classes=classes, device=features.device)
        present, labels = labels.unique(return_inverse=True)
        sums = features.new_zeros(len(present), features.shape[1]).index_add_(0, labels, features)
        means = sums / labels.bincount().unsqueeze(-1)
        centre = features.mean(0, keepdim=True)
        background = _root(features - centre) if relative else features.new_zeros(features.shape[1], 0)
        return cls(means, _root(features - means[labels]), centre, background)

    def __call__(self, features: Tensor, logits: Tensor | None = None) -> Tensor:
        """Scores [n]; `logits` are not used."""
        given = _matching(features, self.means).double()
        centre, root, background = (part.to(given) for part in (self.centre, self.root, self.background))
        means = (self.means.to(given) - centre) @ root  # about the centre, so that large means do not cost digits
        found = []
        for rows in (given - centre).split(max(1, _CHUNK // (root.shape[1] + background.shape[1] + len(means)))):
            nearest = torch.cdist(rows @ root, means, compute_mode="donot_use_mm_for_euclid_dist").amin(-1).square()
            found.append(nearest - (rows @ background).square().sum(-1))
        return torch.cat(found).to(features.dtype)


@dataclass(frozen=True)
class Vim:
    """Virtual-logit matching (Wang et al. 2022): α‖P(φ − u)‖ − log Σ exp f.

    Attributes:
        origin: u = −W⁺b, where all logits are 0, [features].
        basis: An orthonormal basis of what P projects on: all but the principal directions, [features, directions].
        alpha: α, a tensor without dimensions: mean largest logit over mean ‖P(φ − u)‖ of training examples.
    """

    origin: Tensor
    basis: Tensor
    alpha: Tensor

    @classmethod
    def fit(cls, training: Training, *, directions: int | None = None) -> Self:
        """Find the principal directions and the scale.

        Args:
            training: Features and logits of training examples, weight and bias of the last linear layer.
            directions: Number of principal directions; None: 1000 of 2048 or more features, 512 of 768 or more (as the
                authors), else one half.
        """
        features = _table(training.features, "features").double()
        if training.logits is None or training.weight is None:
            raise ValueError("ViM needs class logits that are the outputs of the network's last nn.Linear.")
        size = features.shape[1]
        default = 1000 if size >= 2048 else 512 if size >= 768 else size // 2
        directions = default if directions is None else directions
        if not 0 < directions < size:
            raise ValueError(f"directions={directions} of {size} features: give a number from 1 to {size - 1}.")
        weight = training.weight.detach().to(features)
        bias = weight.new_zeros(len(weight)) if training.bias is None else training.bias.detach().to(features)
        origin = -torch.linalg.pinv(weight) @ bias
        centred = features - origin
        basis = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, : size - directions]  # eigenvalues rise
        residual = (centred @ basis).norm(dim=-1).mean()
        if not residual > _NO_VARIANCE**0.5 * centred.norm(dim=-1).mean():
            raise ValueError(
                f"All training features lie in {directions} principal directions: give ViM fewer directions."
            )
        return cls(origin, basis, training.logits.double().amax(-1).mean() / residual)

    def __call__(self, features: Tensor, logits: Tensor | None = None) -> Tensor:
        """Scores [n]."""
        if logits is None:
            raise ValueError("ViM needs the logits beside the features.")
        given = _matching(features, self.origin).double()
        residual: Tensor = ((given - self.origin.to(given)) @ self.basis.to(given)).norm(dim=-1)
        return (self.alpha.to(given) * residual + energy(logits.double())).to(features.dtype)


def _root(centred: Tensor) -> Tensor:
    """A with AAᵀ = (Σ xxᵀ/n)⁺: directions without variance are left out, as a pseudo-inverse does."""
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    varied = values > _NO_VARIANCE * values[-1]
    root: Tensor = vectors[:, varied] / values[varied].sqrt()
    return root


def _table(values: Tensor, name: str) -> Tensor:
    if values.dim() != 2 or not values.numel() or not values.is_floating_point():
        given = f"shape {list(values.shape)} and dtype {values.dtype}"
        raise ValueError(f"{name} have {given}; pass floating-point numbers, one row an example.")
    return values.detach()


def _matching(features: Tensor, fitted: Tensor) -> Tensor:
    if _table(features, "features").shape[1] != fitted.shape[-1]:
        raise ValueError(f"{features.shape[1]} features were given; the score was fitted to {fitted.shape[-1]}.")
    return features.detach()
