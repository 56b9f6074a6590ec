"""The methods, by name. Adding one: a file here, a line in `METHODS`, a row in the contract test."""

from credo.core.posterior import Posterior
from credo.methods.bbb import BBB
from credo.methods.dropout import MCDropout
from credo.methods.ensemble import Ensemble
from credo.methods.point import MAP

METHODS: dict[str, type[Posterior]] = {
    "map": MAP,
    "mc-dropout": MCDropout,
    "ensemble": Ensemble,
    "bbb": BBB,
}

__all__ = ["BBB", "MAP", "METHODS", "Ensemble", "MCDropout"]
