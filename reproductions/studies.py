"""The studies by the name that the command line takes."""

from __future__ import annotations

from reproductions import adversarial_sampling, bayesian_cnn, continual, hcl, node_bnn, vogn, weight_sampling
from reproductions.study import Study

STUDIES: dict[str, Study] = {
    "weight-sampling": weight_sampling.STUDY,
    "vogn": vogn.STUDY,
    "adversarial-sampling": adversarial_sampling.STUDY,
    "bayesian-cnn": bayesian_cnn.STUDY,
    "node-bnn": node_bnn.STUDY,
    "continual": continual.STUDY,
    "hcl": hcl.STUDY,
}
