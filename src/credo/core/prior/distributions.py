"""Prior distributions over weights. Log densities and KLs are in nats, summed over the entries given."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credo.core.network.flat_layout import Layout

Value = float | Tensor | Mapping[str, float | Tensor]
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_SCALE_NAMES = {"gaussian": "std", "laplace": "b"}


class Prior(nn.Module, ABC):
    """Distribution over the flat vector of random weights.

    A module, so that tensor-valued means and scales follow `.to(device)` and are saved with the posterior.
    """

    def bind(self, layout: Layout, *, data_size: int, device: torch.device) -> Prior:
        """The prior of a concrete parameter vector; values given by name become vectors (copies).

        Args:
            layout: Names and shapes of the random parameters in the vector.
            data_size: Number of training examples, for priors that are defined by a penalty on the mean loss.
            device: Device of the vector.
        """
        return self

    def at(self, chosen: Tensor) -> Prior:
        """The prior restricted to the entries where the mask `chosen` is True; `config()` stays the same."""
        return self

    @abstractmethod
    def log_prob(self, weights: Tensor) -> Tensor:
        """log p(weights), summed."""

    def kl(self, mean: Tensor, std: Tensor) -> Tensor | None:
        """KL(N(mean, std²) ‖ prior), summed; None where it has no closed form."""
        return None

    @property
    @abstractmethod
    def std(self) -> float | Tensor:
        """Standard deviation of the prior, the natural scale for initial weights."""

    def moments_for(self, mean: Tensor, std: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Mean and standard deviation of this prior for weights with posterior N(mean, std²)."""
        return getattr(self, "mean", 0.0), self.std

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-serialisable description from which `make_prior` rebuilds the prior (tensors are saved separately)."""


class _Located(Prior):
    """Priors with a mean and a positive scale, each a number, a vector, or values by parameter-name glob."""

    kind: str
    nonnegative = ("scale_vector",)

    def __init__(self, mean: Value = 0.0, scale: Value = 1.0) -> None:
        super().__init__()
        self._given = {"mean": mean, "scale": scale}
        self._entries: int | None = None
        is_uniform = not any(isinstance(value, Mapping | Tensor) for value in self._given.values())
        # Mean and scale where they are one number each for all weights.
        self.numbers = (float(mean), float(scale)) if is_uniform else None  # type: ignore[arg-type]
        for key, value in self._given.items():
            _check_value(key, value, positive=key == "scale")
            setattr(self, f"_{key}", None if isinstance(value, Mapping | Tensor) else float(value))
            tensor = value.detach().clone() if isinstance(value, Tensor) else None
            self.register_buffer(f"{key}_vector", tensor)

    def bind(self, layout: Layout, *, data_size: int, device: torch.device) -> Prior:
        """A copy on `device` with values by name expanded over `layout`; shares no memory (`data_size` is not used)."""
        filled: dict[str, float | Tensor] = {}
        for key, given in self._given.items():
            is_mapping = isinstance(given, Mapping)
            value = layout.fill(given, what=f"The prior's {key}") if is_mapping else self._read(key)
            if isinstance(value, Tensor) and value.shape != (layout.size,):
                raise ValueError(
                    f"The prior's {key} has shape {list(value.shape)}, but {layout.size} weights are random; "
                    "give one number or a dict from parameter names (or globs) to tensors."
                )
            filled[key] = value.to(layout.dtype) if isinstance(value, Tensor) else value
        return type(self)(filled["mean"], filled["scale"]).to(device)

    def at(self, chosen: Tensor) -> Prior:
        """A copy with fewer entries; `config()` keeps the number of entries before pruning."""
        values = (self._read(key) for key in ("mean", "scale"))
        prior = type(self)(*(v[chosen.to(v.device)] if isinstance(v, Tensor) else v for v in values))
        prior._entries = self._entries or len(chosen)
        return prior

    @property
    def mean(self) -> float | Tensor:
        """Mean of the prior."""
        return self._read("mean")

    @property
    def scale(self) -> float | Tensor:
        """Scale parameter: a Gaussian's standard deviation, a Laplace's b."""
        return self._read("scale")

    @property
    def is_uniform(self) -> bool:
        """Whether one mean and one scale are those of all weights, however many there are."""
        return self.numbers is not None

    def _read(self, key: str) -> float | Tensor:
        number: float | None = getattr(self, f"_{key}")
        vector: Tensor | None = getattr(self, f"{key}_vector")
        if vector is None and number is None:
            raise RuntimeError("This prior has values by name: bind it to a layout first (a posterior does so).")
        return number if number is not None else vector  # type: ignore[return-value]

    def config(self) -> dict[str, Any]:
        """Kind, mean and scale; vectors are described by their length."""
        values = {key: self._read(key) for key in ("mean", "scale")}
        described = {k: {"entries": self._entries or len(v)} if isinstance(v, Tensor) else v for k, v in values.items()}
        return {"kind": self.kind, "mean": described["mean"], _SCALE_NAMES[self.kind]: described["scale"]}


class Gaussian(_Located):
    """N(mean, std²) independently for every weight.

    Args:
        mean: One number, a vector over all random weights, or a dict from parameter names (or globs) to either.
        std: Standard deviation, in the same forms.
    """

    kind = "gaussian"

    def __init__(self, mean: Value = 0.0, std: Value = 1.0) -> None:
        super().__init__(mean, std)

    @property
    def std(self) -> float | Tensor:
        """Standard deviation."""
        return self.scale

    def log_prob(self, weights: Tensor) -> Tensor:
        """Normalised log density, summed."""
        z = (weights - self.mean) / self.scale
        return -0.5 * z.square().sum() - _sum_log(self.scale, weights) - weights.numel() * HALF_LOG_2PI

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """Σ log(s/σ) + (σ² + (μ−m)²)/(2s²) − ½."""
        offset = mean - self.mean if isinstance(self.mean, Tensor) or self.mean else mean
        value: Tensor = _GaussianKL.apply(offset, std, self.scale)  # type: ignore[no-untyped-call]
        return value


class _GaussianKL(torch.autograd.Function):
    """`Gaussian.kl` with hand-written gradients: fewer passes over memory than autograd needs."""

    @staticmethod
    def forward(ctx: Any, offset: Tensor, std: Tensor, scale: float | Tensor) -> Tensor:
        """KL from a Gaussian with mean `offset` and std `std` to one with mean 0 and std `scale`; `ctx` saves them."""
        ctx.save_for_backward(offset, std)
        ctx.scale = scale
        if isinstance(scale, Tensor):
            quadratic = 0.5 * ((std.square() + offset.square()) / scale.square()).sum()
        else:
            quadratic = (_dot(std, std) + _dot(offset, offset)) / (2 * scale**2)
        return quadratic - std.log().sum() + _sum_log(scale, std) - 0.5 * std.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        offset, std = ctx.saved_tensors
        precision = grad / ctx.scale**2
        return offset * precision, (std * precision).sub_(std.reciprocal().mul_(grad)), None


class Laplace(_Located):
    """Density exp(−|w−mean|/b)/(2b): sparse, with heavier tails than a Gaussian. Its std is √2·b.

    Args:
        mean: One number, a vector over all random weights, or a dict from parameter names (or globs) to either.
        b: Scale, in the same forms.
    """

    kind = "laplace"

    def __init__(self, mean: Value = 0.0, b: Value = 1.0) -> None:
        super().__init__(mean, b)

    @property
    def std(self) -> float | Tensor:
        """√2·b."""
        return self.scale * math.sqrt(2)

    def log_prob(self, weights: Tensor) -> Tensor:
        """Normalised log density, summed."""
        z = (weights - self.mean).abs() / self.scale
        return -z.sum() - _sum_log(self.scale, weights) - weights.numel() * math.log(2)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """Closed form, using the mean of a folded normal, E|w−m|."""
        offset = mean - self.mean
        z = offset / std
        folded = std * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + offset * torch.erf(z / math.sqrt(2))
        entropy = std.log().sum() + mean.numel() * (HALF_LOG_2PI + 0.5)
        return (folded / self.scale).sum() + _sum_log(self.scale, mean) + mean.numel() * math.log(2) - entropy


class ScaleMixture(Prior):
    """π·N(0, std1²) + (1−π)·N(0, std2²), a spike-and-slab prior (Blundell et al. 2015). No closed-form KL.

    Args:
        pi: Weight of the first component, strictly between 0 and 1.
        std1: Standard deviation of the first component (the slab).
        std2: Standard deviation of the second component (the spike).
    """

    def __init__(self, pi: float = 0.5, std1: float = math.exp(-1), std2: float = math.exp(-7)) -> None:
        super().__init__()
        if not 0 < pi < 1:
            raise ValueError(f"pi={pi} must lie between 0 and 1; for one component use Gaussian.")
        _check_value("std1", std1, positive=True)
        _check_value("std2", std2, positive=True)
        self.pi, self.std1, self.std2 = float(pi), float(std1), float(std2)

    def log_prob(self, weights: Tensor) -> Tensor:
        """Log density, summed; computed in log space, since at std2 = e⁻⁷ the density underflows."""
        value: Tensor = _MixtureLogProb.apply(weights, self.pi, self.std1, self.std2)  # type: ignore[no-untyped-call]
        return value

    @property
    def std(self) -> float:
        """Standard deviation of the mixture."""
        return math.sqrt(self.pi * self.std1**2 + (1 - self.pi) * self.std2**2)

    def config(self) -> dict[str, Any]:
        """Kind and parameters."""
        return {"kind": "scale-mixture", "pi": self.pi, "std1": self.std1, "std2": self.std2}


class _MixtureLogProb(torch.autograd.Function):
    """Σ log(π N(w; 0, s1²) + (1−π) N(w; 0, s2²)); the gradient weights −w/s² by the responsibilities."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, pi: float, std1: float, std2: float) -> Tensor:
        """Log density of `weights` with mixture weight `pi` and the stds `std1`, `std2`; `ctx` saves log odds."""
        square = weights.square()
        wide = square * (-0.5 / std1**2) + (math.log(pi) - math.log(std1))
        narrow = square * (-0.5 / std2**2) + (math.log1p(-pi) - math.log(std2))
        ctx.save_for_backward(weights, wide - narrow)
        ctx.precisions = (1 / std1**2, 1 / std2**2)
        return torch.logaddexp(wide, narrow).sum() - weights.numel() * HALF_LOG_2PI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weights, difference = ctx.saved_tensors
        first, second = ctx.precisions
        # Compute both responsibilities: the rounding error of 1 − r, times 1/s2² ≈ 10⁶, would swamp 1/s1².
        pull = torch.sigmoid(difference).mul_(first).add_(torch.sigmoid(-difference), alpha=second)
        return pull.mul_(weights).mul_(-grad), None, None, None


class LayerL2(Prior):
    """The penalty strength·Σ_layers (1/units)·Σ w² on the mean loss, for MAP only (Szegedy et al. 2013).

    Biases are not penalised. A layer's number of units is the first dimension of its weight: the outputs of linear and
    convolutional layers, but the inputs of transposed convolutions and the rows of embeddings. An improper prior:
    `log_prob` omits the constant.

    Args:
        strength: Factor of the penalty, 0 or more.
        precision: Per-weight precision; computed by `bind`.
    """

    precision: Tensor

    def __init__(self, strength: float, precision: Tensor | None = None) -> None:
        super().__init__()
        if not (math.isfinite(strength) and strength >= 0):
            raise ValueError(f"strength={strength} must not be negative.")
        self.strength = float(strength)
        self.register_buffer("precision", precision, persistent=False)

    def bind(self, layout: Layout, *, data_size: int, device: torch.device) -> Prior:
        """Set the precision of each weight in `layout` to 2·data_size·strength/units, of biases to 0, on `device`."""
        pieces = {
            name: torch.full(
                shape, 2 * data_size * self.strength / shape[0] if len(shape) > 1 else 0.0, dtype=layout.dtype
            )
            for name, shape in layout.shapes.items()
        }
        return LayerL2(self.strength, layout.flatten(pieces).to(device))

    def log_prob(self, weights: Tensor) -> Tensor:
        """−½ Σ precision·w²."""
        return -0.5 * (self.precision * weights.square()).sum()

    @property
    def std(self) -> Tensor:
        """1/√precision; infinite for biases."""
        return self.precision.rsqrt()

    def config(self) -> dict[str, Any]:
        """Kind and strength."""
        return {"kind": "layer-l2", "strength": self.strength}


def _check_value(name: str, value: Value, *, positive: bool) -> None:
    for entry in value.values() if isinstance(value, Mapping) else (value,):
        tensor = torch.as_tensor(entry)
        if not bool(torch.isfinite(tensor).all()) or (positive and not bool((tensor > 0).all())):
            raise ValueError(f"The prior's {name} must be finite{' and positive' if positive else ''}, got {entry}.")


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return a.flatten().dot(b.flatten())


def _sum_log(scale: float | Tensor, like: Tensor) -> float | Tensor:
    """Σ log scale over the entries of `like`."""
    return scale.log().sum() if isinstance(scale, Tensor) else like.numel() * math.log(scale)
