"""The layers of a flow: each maps x to (y, log |det ∂y/∂x|) by `forward` and back by `inverse`.

A coupling leaves half of the features as they are and maps the others by y = (x + t)·exp(s), where s and t are
functions of the first half and s = scale·tanh(·). Its Jacobian is triangular, so that log |det ∂f/∂x| is the sum of s.
No layer has batch statistics: a frozen copy computes what the flow itself computed.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Permutation(nn.Module):
    """Reorders the features.

    Args:
        order: Which feature comes where.
    """

    order: Tensor
    back: Tensor

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log |det ∂y/∂x|, which is 0."""
        return x[:, self.order], x.new_zeros(len(x))

    def inverse(self, y: Tensor) -> Tensor:
        """x such that `forward(x)` is y."""
        return y[:, self.back]


class Coupling(nn.Module):
    """y = (x + t)·exp(s) on half of the features, given the other half; the identity before training.

    Args:
        features: Number of features.
        second: Map the second half, given the first; else the first, given the second.
        hidden: Hidden units of the conditioner, per layer.
        layers: Hidden layers of the conditioner.
        scale: Largest |s|.
        generator: Source of the first weights.
        half: Features of the first half, if it is not one half.
    """

    def __init__(
        self,
        features: int,
        *,
        second: bool,
        hidden: int,
        layers: int,
        scale: float,
        generator: torch.Generator,
        half: int | None = None,
    ) -> None:
        super().__init__()
        self.boundary, self.second, self.scale = features // 2 if half is None else half, second, scale
        given = self.boundary if second else features - self.boundary
        sizes = [given, *[hidden] * layers, 2 * (features - given)]
        self.layers = nn.ModuleList(_linear(inputs, outputs, generator) for inputs, outputs in pairwise(sizes))
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log |det ∂y/∂x|."""
        given, rest = self._halves(x)
        s, t = self._conditioned(given)
        return self._joined(given, (rest + t) * s.exp()), s.sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        """x such that `forward(x)` is y."""
        given, rest = self._halves(y)
        s, t = self._conditioned(given)
        return self._joined(given, rest * (-s).exp() - t)

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x[:, : self.boundary], x[:, self.boundary :]
        return (first, second) if self.second else (second, first)

    def _joined(self, given: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([given, rest] if self.second else [rest, given], 1)

    def _conditioned(self, given: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[:-1]:
            given = F.relu(layer(given))
        s, t = self.layers[-1](given).chunk(2, 1)
        return self.scale * s.tanh(), t


class ActNorm(nn.Module):
    """y = (x + bias)·exp(log_scale) per feature (Kingma and Dhariwal 2018); the identity until `initialise_`.

    Args:
        features: Number of features.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))
        self.log_scale = nn.Parameter(torch.zeros(features))

    @torch.no_grad()
    def initialise_(self, x: Tensor, *, least_std: float = 0.1) -> None:
        """Give the rows of `x` mean 0 and variance 1 per feature.

        Args:
            x: Inputs of this layer; a single row sets the mean alone.
            least_std: Floor of the standard deviation: a feature that is constant in the first task, such as a pixel
                of the border, may vary in a later one.
        """
        self.bias.copy_(-x.mean(0))
        if len(x) > 1:
            self.log_scale.copy_(-x.std(0).clamp_min(least_std).log())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log |det ∂y/∂x|."""
        return (x + self.bias) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))

    def inverse(self, y: Tensor) -> Tensor:
        """x such that `forward(x)` is y."""
        return y * (-self.log_scale).exp() - self.bias


class LogitSqueeze(nn.Module):
    """Maps fractions x to logit(½ + width·(x − ½)), as RealNVP does for pixels.

    The inverse undoes `width`, too; without that, samples would be shrunk towards grey.

    Args:
        width: Below 1, so that 0 and 1 have finite images.
    """

    def __init__(self, width: float = 0.9) -> None:
        super().__init__()
        if not 0 < width < 1:
            raise ValueError(
                f"width={width} must be between 0 and 1: the part of (0, 1) that pixels are squeezed into."
            )
        self.width = width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log |det ∂y/∂x|."""
        p = 0.5 + self.width * (x - 0.5)
        log_derivatives = math.log(self.width) - p.log() - (-p).log1p()
        return p.logit(), log_derivatives.sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        """x such that `forward(x)` is y; in ½ ± ½/width, a little beyond 0 and 1."""
        return 0.5 + (y.sigmoid() - 0.5) / self.width


class CosineTransform(nn.Module):
    """The orthonormal two-dimensional cosine transform of square images, with a block of low frequencies first.

    Args:
        features: Pixels of an image, a square number.
        low: Rows and columns of the block of low frequencies.
    """

    matrix: Tensor

    def __init__(self, features: int, low: int) -> None:
        super().__init__()
        side = math.isqrt(features)
        if side * side != features or not 2 <= low < side:
            raise ValueError(
                f"low={low} with {features} features: the frequencies of square images, low between 2 and their "
                "height - 1; low=0 for other inputs."
            )
        rows, places = torch.arange(side).double()[:, None], torch.arange(side).double()
        basis = (math.pi * (places + 0.5) * rows / side).cos() * math.sqrt(2 / side)
        basis[0] /= math.sqrt(2)
        block = torch.zeros(side, side, dtype=torch.bool)
        block[:low, :low] = True
        order = torch.cat([block.flatten().nonzero()[:, 0], (~block).flatten().nonzero()[:, 0]])
        self.register_buffer("matrix", torch.kron(basis, basis)[order].float(), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies and log |det ∂y/∂x|, which is 0."""
        return x @ self.matrix.T, x.new_zeros(len(x))

    def inverse(self, y: Tensor) -> Tensor:
        """The image of frequencies."""
        return y @ self.matrix


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A layer with He's weights and no bias, without a draw from the global generator."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    with torch.no_grad():
        layer.weight.normal_(0, math.sqrt(2 / inputs), generator=generator)
        layer.bias.zero_()
    return layer
