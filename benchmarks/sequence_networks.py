"""Networks of attention and recurrence that are timed, from torch's own layers as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def encoder(width: int, heads: int, layers: int) -> nn.TransformerEncoder:
    """Torch's transformer encoder without dropout, feed-forward layers four times as wide.

    Args:
        width: Features of a position.
        heads: Heads of attention.
        layers: How many layers.
    """
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class PooledTransformer(nn.Module):
    """A transformer over a series, whose mean over positions is classified.

    Args:
        classes: Number of classes.
        features: Features of a position of the input.
        width: Features inside.
        heads: Heads of attention.
        layers: How many layers.
    """

    def __init__(self, classes: int, features: int = 16, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.encoder = encoder(width, heads, layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of series [batch, positions, features]."""
        logits: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return logits


class PatchTransformer(nn.Module):
    """A small vision transformer: patches by a convolution, learnt positions, the mean over them classified.

    Args:
        classes: Number of classes.
        size: Height and width of an image.
        patch: Height and width of a patch.
        width: Features inside.
        heads: Heads of attention.
        layers: How many layers.
    """

    def __init__(
        self, classes: int, size: int = 32, patch: int = 4, width: int = 96, heads: int = 3, layers: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.encoder = encoder(width, heads, layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images [batch, 3, size, size]."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.encoder(tokens)).mean(1))
        return logits


class LastState(nn.Module):
    """An LSTM whose last state is classified.

    Args:
        classes: Number of classes.
        features: Features of a position of the input.
        width: Features of a state.
        layers: How many layers.
    """

    def __init__(self, classes: int, features: int = 16, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of series [batch, positions, features]."""
        states, _ = self.lstm(x)
        logits: Tensor = self.head(states[:, -1])
        return logits
