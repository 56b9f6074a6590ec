"""An invertible network: affine couplings with MLP conditioners (Dinh et al. 2017).

Images may be taken to the frequencies of an orthonormal cosine transform first. The high ones are then mapped once,
given the low ones, and only the low ones pass all couplings: a flow of two scales, in which few features tell classes
apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from credo.continual.hybrid.layers import ActNorm, CosineTransform, Coupling, LogitSqueeze, Permutation
from credo.core.errors import unknown
from credo.core.support.validate import checked_count

ORDERS = ("permuted", "swapped")


class Flow(nn.Module):
    """Couplings in a row: `forward(x)` is (z, log |det ∂z/∂x|), `inverse(z)` is x.

    Args:
        features: Number of features of an input, 2 or more.
        couplings: Number of couplings.
        hidden: Hidden units of each layer of a conditioner.
        layers: Hidden layers of a conditioner.
        scale: Largest |log scale| of a coupling.
        order: Couplings map the second and the first half in turn. `"permuted"`: features are reordered at random
            before every second coupling. `"swapped"`: they are not.
        actnorm: Put an ActNorm before each coupling; see `initialise_`.
        squeeze: Width of a `LogitSqueeze` before everything, for pixels in [0, 1]; 0 for none.
        low: For square images: the couplings map the `low`·`low` lowest frequencies of the image, standardised by an
            ActNorm; one more coupling has mapped the other frequencies, given these. 0: inputs as they are.
        seed: Seed of permutations and first weights.
    """

    def __init__(
        self,
        features: int,
        *,
        couplings: int = 8,
        hidden: int = 256,
        layers: int = 2,
        scale: float = 2.0,
        order: str = "permuted",
        actnorm: bool = False,
        squeeze: float = 0.0,
        low: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        checked_count("features", features, least=2, what="features of an input; a coupling needs two halves")
        for name, value in (("couplings", couplings), ("hidden", hidden), ("layers", layers)):
            checked_count(name, value)
        if order not in ORDERS:
            raise ValueError(unknown("order", order, ORDERS))
        if not scale > 0:
            raise ValueError(f"scale={scale} must be positive: the largest |log scale| of a coupling.")
        self.features, self.leading = features, low * low or features
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"hidden": hidden, "layers": layers, "scale": scale, "generator": generator}
        first: list[nn.Module] = [LogitSqueeze(squeeze)] if squeeze else []
        if low:
            first += [CosineTransform(features, low), ActNorm(features)]
            first.append(Coupling(features, second=True, half=self.leading, **options))
        parts: list[nn.Module] = []
        for index in range(couplings):
            if order == "permuted" and index % 2 == 0:
                parts.append(Permutation(torch.randperm(self.leading, generator=generator)))
            parts += [ActNorm(self.leading)] if actnorm else []
            parts.append(Coupling(self.leading, second=index % 2 == 0, **options))
        self.first, self.parts = nn.ModuleList(first), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent points z and log |det ∂z/∂x| of each row."""
        total = x.new_zeros(len(x))
        for part in self.first:
            x, log_det = part(x)
            total = total + log_det
        leading, rest = x[:, : self.leading], x[:, self.leading :]
        for part in self.parts:
            leading, log_det = part(leading)
            total = total + log_det
        return torch.cat([leading, rest], 1), total

    def inverse(self, z: Tensor) -> Tensor:
        """The inputs of latent points."""
        leading, rest = z[:, : self.leading], z[:, self.leading :]
        for part in reversed(self.parts):
            leading = part.inverse(leading)  # type: ignore[operator]
        z = torch.cat([leading, rest], 1)
        for part in reversed(self.first):
            z = part.inverse(z)  # type: ignore[operator]
        return z

    @torch.no_grad()
    def initialise_(self, x: Tensor) -> None:
        """Set every ActNorm such that the rows of `x` leave it standardised; nothing without ActNorm."""
        for part in [*self.first, *self.parts]:
            x = x[:, : self.leading] if part in self.parts else x
            if isinstance(part, ActNorm):
                part.initialise_(x)
            x = part(x)[0]
