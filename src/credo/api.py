"""Everything that `import credo` offers; imported when the first of it is used."""

from credo import likelihoods, methods, optim, priors
from credo.calibration import calibrate, recalibrate
from credo.continual.gaussian_algebra import compare, merge
from credo.core.distributed.process_group import ProcessGroup
from credo.core.distributed.setup import distribute
from credo.core.errors import (
    CalibrationWarning,
    CheckpointWarning,
    CredoError,
    CredoWarning,
    DataSizeWarning,
    DataWarning,
    DivergenceWarning,
    ExampleCountWarning,
    FewRowsWarning,
    FileFormatError,
    InputsError,
    LikelihoodWarning,
    LostProcessError,
    MissingPackageError,
    NonFiniteError,
    PredictiveWarning,
    ReusedRowsWarning,
    UnsupportedModelError,
)
from credo.core.example_counts import Counted
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.conformal import ConformalIntervals, ConformalSets
from credo.core.held_out.ledger import Ledger
from credo.core.held_out.recalibration import Recalibration
from credo.core.held_out.risk_sets import RiskControlledSets
from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood
from credo.core.network.batchnorm import frozen_statistics, refresh_statistics
from credo.core.per_example.api import per_example_squares
from credo.core.posterior import GaussianPosterior, Posterior, Terms
from credo.core.prior import Prior
from credo.core.support.user_warnings import warn as warn
from credo.detection import OodComparison, OodDetector, OodStudy, compare_scores, ood_study
from credo.doctor import Diagnosis, Finding, diagnose
from credo.evaluate import agreement, chain_study, conformal, ensemble_study, measure, sample_study
from credo.exporting import export
from credo.methods import *  # noqa: F403
from credo.models import lora, merge_lora, summary
from credo.predict import (
    ClassPrediction,
    DenseClassPrediction,
    DistributionPrediction,
    MultiLabelPrediction,
    Predictor,
    QuantilePrediction,
    RegressionPrediction,
    predict,
    predictor,
)
from credo.training import describe, fit, load, save, train
from credo.tuning import auto, tune
from credo.version import __version__

__all__ = [
    "Bernoulli",
    "Calibration",
    "CalibrationWarning",
    "Categorical",
    "CheckpointWarning",
    "ClassPrediction",
    "ConformalIntervals",
    "ConformalSets",
    "Counted",
    "CredoError",
    "CredoWarning",
    "DataSizeWarning",
    "DataWarning",
    "DenseClassPrediction",
    "Diagnosis",
    "DistributionPrediction",
    "DivergenceWarning",
    "ExampleCountWarning",
    "FewRowsWarning",
    "FileFormatError",
    "Finding",
    "GaussianNoise",
    "GaussianPosterior",
    "InputsError",
    "Ledger",
    "Likelihood",
    "LikelihoodWarning",
    "LostProcessError",
    "MissingPackageError",
    "MultiLabelPrediction",
    "NonFiniteError",
    "OodComparison",
    "OodDetector",
    "OodStudy",
    "Posterior",
    "PredictiveWarning",
    "Predictor",
    "Prior",
    "ProcessGroup",
    "QuantilePrediction",
    "Recalibration",
    "RegressionPrediction",
    "ReusedRowsWarning",
    "RiskControlledSets",
    "Terms",
    "UnsupportedModelError",
    "__version__",
    "agreement",
    "auto",
    "calibrate",
    "chain_study",
    "compare",
    "compare_scores",
    "conformal",
    "describe",
    "diagnose",
    "distribute",
    "ensemble_study",
    "export",
    "fit",
    "frozen_statistics",
    "likelihoods",
    "load",
    "lora",
    "measure",
    "merge",
    "merge_lora",
    "ood_study",
    "optim",
    "per_example_squares",
    "predict",
    "predictor",
    "priors",
    "recalibrate",
    "refresh_statistics",
    "sample_study",
    "save",
    "summary",
    "train",
    "tune",
]
__all__ += methods.__all__

# Names of 0.1, until 0.3, with the new ones. The last name here: the module is complete if it has this one.
RENAMED = {
    "Gaussian": (priors.Gaussian, "credo.priors.Gaussian"),
    "LayerL2": (priors.LayerL2, "credo.priors.LayerL2"),
    "ScaleMixture": (priors.ScaleMixture, "credo.priors.ScaleMixture"),
    "Team": (ProcessGroup, "credo.ProcessGroup"),
}
