"""The evidence log p(D) of a Laplace approximation, and the prior and noise that maximise it.

log p(D) ≈ log p(D|θ*)/T − ½(log|P| − log|P₀| + (θ* − μ₀)ᵀP₀(θ* − μ₀)) (MacKay 1992). With one precision α for a group
of weights it is largest where α·Σ(θ − μ₀)² = γ, their effective number Σ (1 − α·P⁻¹ᵢᵢ) = Σ λ/(λ + α), λ the eigenvalues
of H/T; and for a Gaussian noise where σ² = Σ residuals²/(n − T·γ), n the number of residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from credo.core.arguments import Group
from credo.core.errors import unknown
from credo.core.prior import HALF_LOG_2PI
from credo.core.support.validate import is_count
from credo.methods.laplace.structures import Structure

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

    def is_due(self, epoch: int) -> bool:
        """Whether to choose after so many epochs."""
        return self.every is not None and epoch > self.burn_in and (epoch - self.burn_in) % self.every == 0


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

    def log_likelihood(self, variance: float) -> float:
        """That of all data under another noise."""
        return -0.5 * self.squares / variance - self.count * (0.5 * math.log(variance) + HALF_LOG_2PI)


@dataclass(frozen=True)
class Maximum:
    """What maximises the evidence: the precision of each group, and the variance of the noise if that is learned."""

    precisions: Tensor
    variance: float | None


class Search:
    """Searches the maximum of the evidence, for weights and a curvature that stay as they are.

    The noise under a diagonal curvature is that of the largest likelihood: it counts weights that depend on each other
    several times, often more than there are data.

    Both fixed points are damped, log α ← ½(log α + log γ/Σ(θ − μ₀)²): alone, α oscillates where data are few, since γ
    is proportional to 1/α there; the mean of logarithms contracts at least twofold everywhere.

    Args:
        structure: The curvature.
        temperature: T.
        residuals: Those of a regression whose noise is learned.
    """

    def __init__(self, structure: Structure, temperature: float, residuals: Residuals | None) -> None:
        self.structure, self.temperature, self.residuals = structure, temperature, residuals

    def over_groups(self, groups: Sequence[tuple[str, ...]], offset: Tensor) -> Maximum:
        """The best precision of each group, and the best noise.

        Args:
            groups: Names of the parameters that share a precision.
            offset: θ* − μ₀ of all random weights.
        """
        squares = self.structure.layout.split(offset.double().square(), cast=False)
        each = torch.stack([sum_over(squares, group) for group in groups]).cpu()
        counts = self._counter(groups)

        def improved(alpha: Tensor, temperature: float) -> tuple[Tensor, float]:
            count = counts(alpha, temperature)
            return (count / each).nan_to_num(1.0, HIGHEST).clamp(LOWEST, HIGHEST), float(count.sum())

        return self._fixed_point(improved, torch.ones(len(groups), dtype=torch.double))

    def over_spectrum(self, spectrum: Tensor, squares: float) -> Maximum:
        """The best noise under one precision of weights that are more than the structure's, which is the best, too.

        Args:
            spectrum: Eigenvalues of their curvature at the residuals' variance.
            squares: Σ (θ − μ₀)² of them.
        """
        counts = partial(_counts_by_spectrum, [spectrum.double().cpu()])

        def improved(alpha: Tensor, temperature: float) -> tuple[Tensor, float]:
            count = counts(alpha, temperature)
            return (count / squares).nan_to_num(1.0, HIGHEST).clamp(LOWEST, HIGHEST), float(count.sum())

        return self._fixed_point(improved, torch.ones(1, dtype=torch.double), counts_weights=True)

    def over_noise(self, precision: float | Tensor) -> Maximum:
        """The best noise under a prior of this precision, one number or a vector."""
        alpha = torch.ones(1, dtype=torch.double)

        def improved(_: Tensor, temperature: float) -> tuple[Tensor, float]:
            self.structure.update_(precision, temperature)
            return alpha, float((1 - precision * self.structure.variance().double()).sum())

        return self._fixed_point(improved, alpha)

    def _fixed_point(
        self,
        improved: Callable[[Tensor, float], tuple[Tensor, float]],
        alpha: Tensor,
        *,
        counts_weights: bool | None = None,
    ) -> Maximum:
        """Iterate `improved(α, T)`, which gives γ/Σ(θ − μ₀)² and all γ; H ∝ 1/σ², so a noise acts as a temperature."""
        counts = self.structure.counts_weights if counts_weights is None else counts_weights
        variance = None if self.residuals is None else self.residuals.variance
        for _ in range(_STEPS):
            scale = 1.0 if variance is None or self.residuals is None else variance / self.residuals.variance
            wanted, count = improved(alpha, self.temperature * scale)
            new, noise = (alpha * wanted).sqrt(), self._noise(variance, count if counts else 0.0)
            moved = float((new / alpha).log().abs().max())
            if variance is not None and noise is not None:
                moved = max(moved, abs(math.log(noise / variance)))
            alpha, variance = new, noise
            if moved < _TOLERANCE:
                break
        return Maximum(alpha, variance)

    def _noise(self, variance: float | None, count: float) -> float | None:
        if variance is None or self.residuals is None:
            return None
        left = max(self.residuals.count - self.temperature * count, 1e-3 * self.residuals.count)
        return math.sqrt(variance * max(self.residuals.squares / left, 1e-12))

    # -- effective numbers of weights --------------------------------------------------------------------------------

    def _counter(self, groups: Sequence[tuple[str, ...]]) -> Callable[[Tensor, float], Tensor]:
        """The function of α and T that gives γ of each group: by eigenvalues, if no block belongs to several groups."""
        spectra = self.structure.spectra()
        owners = {names: [i for i, group in enumerate(groups) if {*names} & {*group}] for names in spectra or {}}
        if spectra is None or any(len(several) > 1 for several in owners.values()):
            return partial(self._counts_by_variance, groups)
        values: list[list[Tensor]] = [[] for _ in groups]
        for names, spectrum in spectra.items():
            values[owners[names][0]].append(spectrum.double().cpu())
        return partial(_counts_by_spectrum, [torch.cat(each) for each in values])

    def _counts_by_variance(self, groups: Sequence[tuple[str, ...]], alpha: Tensor, temperature: float) -> Tensor:
        """γ = Σ (1 − α·P⁻¹ᵢᵢ)."""
        layout = self.structure.layout
        each = {name: float(a) for group, a in zip(groups, alpha, strict=True) for name in group}
        precision = layout.fill(each, what="The prior's precision")
        assert isinstance(precision, Tensor)
        precision = precision.to(self.structure.device)
        self.structure.update_(precision, temperature)
        shrunk = layout.split(1 - precision.double() * self.structure.variance().double(), cast=False)
        return torch.stack([sum_over(shrunk, group) for group in groups]).cpu()


def _counts_by_spectrum(spectra: Sequence[Tensor], alpha: Tensor, temperature: float) -> Tensor:
    """γ = Σ λ/(λ + α), of the eigenvalues T·λ."""
    return torch.stack([(each / (each + a * temperature)).sum() for each, a in zip(spectra, alpha, strict=True)])


def sum_over(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The sum of all entries of the tensors of these names."""
    return torch.stack([tensors[name].sum() for name in names]).sum()


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
