"""All methods by name. To add one: a file here and a line in `METHODS` (CONTRIBUTING.md)."""

from credo.core.kl_schedule import KLTerm
from credo.core.optimizers import Optimizer
from credo.core.posterior import Posterior
from credo.methods.adversarial_sampling import AdversarialSampling
from credo.methods.bbb.bbb import BBB
from credo.methods.bbb.init import Init
from credo.methods.dropout import MCDropout
from credo.methods.ensemble import Ensemble
from credo.methods.hmc.groups import ChainSettings
from credo.methods.hmc.hmc import HMC
from credo.methods.kfac.groups import KroneckerCurvature
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC
from credo.methods.laplace.evidence import Evidence
from credo.methods.laplace.laplace import Laplace
from credo.methods.last_layer.last_layer import LastLayer
from credo.methods.low_rank_noise import LowRankNoise
from credo.methods.map import MAP
from credo.methods.natural.groups import Curvature, Momentum, Warmup
from credo.methods.natural.ivon import IVON, IVONCurvature, IVONMomentum
from credo.methods.natural.ogn import OGN
from credo.methods.natural.vogn import VOGN
from credo.methods.node.groups import NodeInit, NodeKLTerm, Nodes
from credo.methods.node.node import NodeBNN
from credo.methods.sgmcmc.sghmc import SGHMC
from credo.methods.sgmcmc.sgld import SGLD
from credo.methods.swag.swag import SWAG

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
    "laplace": Laplace,
    "last-layer": LastLayer,
    "low-rank-noise": LowRankNoise,
    "swag": SWAG,
    "sgld": SGLD,
    "sghmc": SGHMC,
    "hmc": HMC,
}

__all__ = [
    "BBB",
    "HMC",
    "IVON",
    "KFAC",
    "MAP",
    "METHODS",
    "OGN",
    "SGHMC",
    "SGLD",
    "SWAG",
    "VOGN",
    "AdversarialSampling",
    "ChainSettings",
    "Curvature",
    "Ensemble",
    "Evidence",
    "IVONCurvature",
    "IVONMomentum",
    "Init",
    "KLTerm",
    "KroneckerCurvature",
    "Laplace",
    "LastLayer",
    "LowRankNoise",
    "MCDropout",
    "Momentum",
    "NodeBNN",
    "NodeInit",
    "NodeKLTerm",
    "Nodes",
    "NoisyKFAC",
    "Optimizer",
    "Warmup",
]
