"""The evidence log p(D) of a Laplace approximation, and the prior and noise that maximise it.

log p(D) ≈ log p(D|θ*)/T − ½(log|P| − log|P₀| + (θ* − μ₀)ᵀP₀(θ* − μ₀)) (MacKay 1992). With one precision α for a group
of weights it is largest where α·Σ(θ − μ₀)² = γ, their effective number Σ (1 − α·P⁻¹ᵢᵢ) = Σ λ/(λ + α), λ the eigenvalues
of H/T; and for a Gaussian noise where σ² = Σ residuals²/(n − T·γ), n the number of residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from credo.core.arguments import Group
from credo.core.errors import unknown
from credo.core.support.validate import is_count
from credo.methods.laplace.structures import Spectra, Structure

GROUPS = ("one", "layer", "tensor")
# Precisions beyond these are those of a group that the data say nothing about, or whose weights are all zero.
LOWEST, HIGHEST = 1e-6, 1e8
_STEPS, _TOLERANCE = 200, 1e-8


@dataclass(frozen=True)
class Evidence(Group):
    """What maximises the evidence, and when.

    Attributes:
        groups: Weights that share a prior precision: all of them (`"one"`), or those of each `"layer"` or `"tensor"`.
        every: Choose it also during training, after every so many epochs, at the cost of a pass each (Immer et al.
            2021); None: only at the end.
        burn_in: Epochs before the first choice during training.
    """

    argument: ClassVar[str] = "evidence"
    short: ClassVar[str] = "groups"

    groups: str = "one"
    every: int | None = None
    burn_in: int = 0

    def __post_init__(self) -> None:
        check_groups("evidence.groups", self.groups)
        if self.every is not None and not is_count(self.every):
            raise ValueError(f"evidence.every={self.every!r} must be a number of epochs, or None.")
        if not is_count(self.burn_in, least=0):
            raise ValueError(f"evidence.burn_in={self.burn_in!r} must be a number of epochs, 0 or more.")

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether to choose after this epoch of so many; the last one's choice follows training anyway."""
        return self.every is not None and self.burn_in < epoch < epochs and (epoch - self.burn_in) % self.every == 0


def check_groups(name: str, groups: str) -> None:
    """Raise ValueError for an unknown choice of the argument `name`."""
    if groups not in GROUPS:
        raise ValueError(unknown(name, str(groups), GROUPS))


def grouped(names: Sequence[str], groups: str) -> list[tuple[str, ...]]:
    """The parameters that share a precision.

    Args:
        names: Names of the random parameters.
        groups: One of `GROUPS`.
    """
    check_groups("groups", groups)
    if groups == "one":
        return [tuple(names)]
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name if groups == "tensor" else name.rpartition(".")[0], []).append(name)
    return [tuple(group) for group in found.values()]


@dataclass(frozen=True)
class Residuals:
    """Those of a regression whose one noise is learned.

    Attributes:
        squares: Their sum of squares over all data.
        count: How many there are.
        variance: The noise's variance that the curvature was found with.
    """

    squares: float
    count: float
    variance: float


@dataclass(frozen=True)
class Found:
    """What maximises the evidence.

    Attributes:
        precisions: One for each group.
        variance: That of the noise; None if it is not learned.
    """

    precisions: list[float]
    variance: float | None


class Tuning:
    """Searches the maximum of the evidence.

    Both fixed points are damped, log α ← ½(log α + log γ/Σ(θ − μ₀)²): alone, α oscillates where data are few, since γ
    is proportional to 1/α there; the mean of logarithms contracts at least twofold everywhere.

    Args:
        structure: The curvature.
        groups: Parameters that share a precision.
        squares: Σ (θ − μ₀)² of each group.
        temperature: T.
        residuals: Those of a regression whose noise is learned.
    """

    def __init__(
        self,
        structure: Structure,
        groups: Sequence[tuple[str, ...]],
        squares: Sequence[float],
        temperature: float,
        residuals: Residuals | None,
    ) -> None:
        self.structure, self.groups, self.squares = structure, groups, torch.tensor(squares, dtype=torch.double)
        self.temperature, self.residuals = temperature, residuals
        self._counts = self._counter(structure.spectra())

    def maximum(self, fixed: float | Tensor | None = None) -> Found:
        """Precisions and noise.

        Args:
            fixed: A precision that stays as it is, one number or a vector: only the noise is searched then.
        """
        alpha = torch.ones(len(self.groups), dtype=torch.double)
        variance = None if self.residuals is None else self.residuals.variance
        for _ in range(_STEPS):
            temperature = self._scaled_temperature(variance)
            if fixed is None:
                counts = self._counts(alpha, temperature)
                wanted = (counts / self.squares).nan_to_num(LOWEST, HIGHEST).clamp(LOWEST, HIGHEST)
                new = (alpha * wanted).sqrt()
            else:
                counts, new = self._fixed_counts(fixed, temperature), alpha
            new_variance = self._noise(variance, float(counts.sum()))
            moved = float((new / alpha).log().abs().max())
            if variance is not None and new_variance is not None:
                moved = max(moved, abs(math.log(new_variance / variance)))
            alpha, variance = new, new_variance
            if moved < _TOLERANCE:
                break
        return Found(alpha.tolist(), variance)

    def _scaled_temperature(self, variance: float | None) -> float:
        """H is proportional to 1/σ², and so another noise is another temperature."""
        if variance is None or self.residuals is None:
            return self.temperature
        return self.temperature * variance / self.residuals.variance

    def _noise(self, variance: float | None, count: float) -> float | None:
        if variance is None or self.residuals is None:
            return variance
        left = max(self.residuals.count - self.temperature * count, 1e-3 * self.residuals.count)
        return math.sqrt(variance * max(self.residuals.squares / left, 1e-30))

    # -- effective numbers of weights --------------------------------------------------------------------------------

    def _counter(self, spectra: Spectra) -> Callable[[Tensor, float], Tensor]:
        """The function that gives γ of each group: from eigenvalues, where no block belongs to several groups."""
        values: list[list[Tensor]] = [[] for _ in self.groups]
        for names, spectrum in spectra.items():
            owners = {index for index, group in enumerate(self.groups) if {*names} & {*group}}
            if len(owners) > 1:
                return self._counts_by_variance
            values[owners.pop()].append(spectrum.double().cpu())
        joined = [torch.cat(each) for each in values]
        return lambda alpha, temperature: torch.stack(
            [(one / (one + a * temperature)).sum() for one, a in zip(joined, alpha, strict=True)]
        )

    def _counts_by_variance(self, alpha: Tensor, temperature: float) -> Tensor:
        """γ = Σ (1 − α·P⁻¹ᵢᵢ) by the roots themselves."""
        layout = self.structure.layout
        by_name = {name: float(a) for group, a in zip(self.groups, alpha, strict=True) for name in group}
        precision = by_group(layout.shapes, by_name, layout.dtype, self.structure.device)
        self.structure.update_(precision, temperature)
        shrunk = layout.split(1 - precision.double() * self.structure.variance().double(), cast=False)
        return torch.stack([torch.stack([shrunk[name].sum() for name in group]).sum() for group in self.groups]).cpu()

    def _fixed_counts(self, precision: float | Tensor, temperature: float) -> Tensor:
        self.structure.update_(precision, temperature)
        return (1 - precision * self.structure.variance().double()).sum().cpu()


def by_group(
    shapes: Mapping[str, torch.Size], values: Mapping[str, float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers by name as a vector over all weights.

    Args:
        shapes: Shapes of the parameters.
        values: A number for each.
        dtype: Precision of the vector.
        device: Its device.
    """
    return torch.cat(
        [torch.full((shape.numel(),), values[name], dtype=dtype, device=device) for name, shape in shapes.items()]
    )


def best_scale(score: Callable[[float], float], *, decades: float = 4.0) -> float:
    """The factor, from 10^−decades to 10^decades, with the lowest score: by halves of decades, then between them.

    Args:
        score: A function of the factor.
        decades: Decades on each side of 1.
    """
    steps = [index / 2 for index in range(-round(2 * decades), round(2 * decades) + 1)]
    scores = {step: score(10**step) for step in steps}
    for width in (0.25, 0.125):
        best = min(scores, key=scores.__getitem__)
        scores |= {step: score(10**step) for step in (best - width, best + width) if step not in scores}
    return float(10 ** min(scores, key=scores.__getitem__))
