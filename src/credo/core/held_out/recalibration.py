"""A map of the predictive distribution, fitted on held-out predictions, as files keep it."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.held_out.class_maps import BetaMap, ClassMap, IsotonicMap, LinearMap
from credo.core.held_out.value_map import ResidualMap
from credo.core.support.validate import is_count, is_number

Map = LinearMap | BetaMap | IsotonicMap | ResidualMap
_MAPS: dict[str, type[Map]] = {
    "temperature": LinearMap,
    "vector": LinearMap,
    "dirichlet": LinearMap,
    "beta": BetaMap,
    "isotonic": IsotonicMap,
    "std-scale": ResidualMap,
    "quantile": ResidualMap,
}
CLASS_KINDS = tuple(kind for kind, made in _MAPS.items() if issubclass(made, ClassMap))
VALUE_KINDS = tuple(kind for kind in _MAPS if kind not in CLASS_KINDS)


@dataclass(frozen=True, eq=False)
class Recalibration:
    """What `credo.recalibrate` chose, which predictions apply after averaging over draws.

    Attributes:
        kind: `"none"`, or one of `CLASS_KINDS` or `VALUE_KINDS`.
        map: The fitted map; None if nothing is better beyond noise.
        rows: Number of held-out rows.
        nll_before: Mean NLL of these rows without it.
        nll_after: Their mean NLL with it, cross-fitted: each row under a map that was fitted without it.
        tried: The cross-fitted mean NLL of every kind that was tried.
    """

    kind: str = "none"
    map: Map | None = None
    rows: int = 0
    nll_before: float = math.nan
    nll_after: float = math.nan
    tried: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a map of another kind."""
        if self.kind not in ("none", *_MAPS):
            raise ValueError(unknown("kind of recalibration", str(self.kind), ("none", *_MAPS)))
        if not isinstance(self.map, type(None) if self.kind == "none" else _MAPS[self.kind]):
            raise ValueError(f"a recalibration of kind {self.kind!r} has the map {type(self.map).__name__}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recalibration) and repr(self.to_dict()) == repr(other.to_dict())

    def __hash__(self) -> int:
        return hash((self.kind, self.rows))

    def __call__(self, probs: Tensor) -> Tensor:
        """Mapped class probabilities.

        Args:
            probs: Probabilities [..., classes].
        """
        if isinstance(self.map, ResidualMap):
            raise TypeError("This recalibration is of a regression: use its interval(mean, std, level).")
        if self.map is None:
            return probs
        self.map.check_classes(probs.shape[-1])
        return self.map(probs)

    def interval(self, mean: Tensor, std: Tensor, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Ends of the central interval that holds a new target with probability `level`.

        Args:
            mean: Predictive means [rows] or [rows, outputs], as before recalibration.
            std: Predictive standard deviations.
            level: Between 0 and 1.
        """
        if isinstance(self.map, ClassMap):
            raise TypeError("This recalibration is of class probabilities: call it with them.")
        if not 0 < level < 1:
            raise ValueError(f"level={level} must lie between 0 and 1, such as 0.9.")
        made = self.map
        if made is None:
            ends = [
                torch.special.ndtri(torch.tensor(q, dtype=torch.float64)) for q in ((1 - level) / 2, (1 + level) / 2)
            ]
        else:
            ends = [made.quantile(q).reshape(mean.shape[1:]) for q in ((1 - level) / 2, (1 + level) / 2)]
        return mean + std * ends[0].to(mean), mean + std * ends[1].to(mean)

    def to_dict(self) -> dict[str, Any]:
        """JSON, with the map's tensors as base64."""
        tensors = {} if self.map is None else {f.name: _packed(getattr(self.map, f.name)) for f in fields(self.map)}
        numbers = {"rows": self.rows, "nll_before": self.nll_before, "nll_after": self.nll_after}
        return {"kind": self.kind, "map": tensors, **numbers, "tried": dict(self.tried or {})}

    @classmethod
    def from_dict(cls, given: Any) -> Recalibration:
        """The recalibration in a file; raises ValueError if it is damaged, and ignores what later versions may add.

        Args:
            given: What `to_dict` returned.
        """
        if not isinstance(given, Mapping) or given.get("kind") not in ("none", *_MAPS):
            raise ValueError(f"a recalibration cannot be {given!r:.60}")
        kind, tensors, tried = given["kind"], given.get("map"), given.get("tried", {})
        numbers = {name: given[name] for name in ("nll_before", "nll_after") if given.get(name) is not None}
        if not all(map(is_number, numbers.values())) or not is_count(given.get("rows"), least=0):
            raise ValueError("rows and NLL of the recalibration are not numbers")
        if not isinstance(tried, Mapping) or not all(value is None or is_number(value) for value in tried.values()):
            raise ValueError("the recalibration has damaged scores")
        return cls(kind, _read(kind, tensors), int(given["rows"]), **numbers, tried=dict(tried))


def _read(kind: str, tensors: Any) -> Map | None:
    if kind == "none":
        return None
    names = [field.name for field in fields(_MAPS[kind])]
    if not isinstance(tensors, Mapping) or not all(name in tensors for name in names):
        raise ValueError(f"the recalibration {kind!r} lacks some of {', '.join(names)}")
    return _MAPS[kind](**{name: _unpacked(tensors[name]) for name in names})


def _packed(tensor: Tensor) -> dict[str, Any]:
    content = tensor.numpy().astype("<f8").tobytes()
    return {"shape": list(tensor.shape), "values": base64.b64encode(content).decode()}


def _unpacked(given: Any) -> Tensor:
    shape = given.get("shape") if isinstance(given, Mapping) else None
    if not isinstance(shape, list) or not all(is_count(size, least=0) for size in shape):
        raise ValueError("the recalibration has a tensor without a shape")
    content = base64.b64decode(str(given.get("values", "")), validate=True)
    if len(content) != 8 * math.prod(shape):
        raise ValueError("the recalibration has damaged numbers")
    return torch.from_numpy(np.frombuffer(content, dtype="<f8").astype(np.float64)).reshape(shape)
