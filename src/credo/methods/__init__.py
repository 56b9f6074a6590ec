"""The methods, by name. Adding one: a file here, a line in `METHODS`, a row in the contract test."""

from credo.core.posterior import Posterior
from credo.methods.adversarial import AdversarialSampling
from credo.methods.bbb import BBB
from credo.methods.dropout import MCDropout
from credo.methods.ensemble import Ensemble
from credo.methods.ivon import IVON
from credo.methods.kfac import KFAC
from credo.methods.node import NodeBNN
from credo.methods.noisy_kfac import NoisyKFAC
from credo.methods.ogn import OGN
from credo.methods.point import MAP
from credo.methods.vogn import VOGN

METHODS: dict[str, type[Posterior]] = {
    "map": MAP,
    "mc-dropout": MCDropout,
    "ensemble": Ensemble,
    "bbb": BBB,
    "vogn": VOGN,
    "ogn": OGN,
    "ivon": IVON,
    "kfac": KFAC,
    "noisy-kfac": NoisyKFAC,
    "node-bnn": NodeBNN,
}

__all__ = [
    "BBB",
    "IVON",
    "KFAC",
    "MAP",
    "METHODS",
    "OGN",
    "VOGN",
    "AdversarialSampling",
    "Ensemble",
    "MCDropout",
    "NodeBNN",
    "NoisyKFAC",
]
