"""Base of classifier and regressor: train a posterior on arrays, and predict with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from credo.core.distributed.setup import distribute
from credo.core.distributed.wrapped_networks import process_count
from credo.core.likelihood import Likelihood
from credo.core.posterior import Posterior
from credo.core.support.input_scale import input_scale
from credo.data import Batches, Split, split_validation
from credo.evaluate import conformal
from credo.methods import METHODS, Ensemble
from credo.predict import predict
from credo.sklearn.building import Common, Model, RandomState, make_network, make_posterior, make_seed
from credo.training import EpochRecord, train
from credo.training.fit import shown
from credo.tuning import auto

Array = NDArray[Any]
# float32 is kept, everything else becomes float64, as in scikit-learn's own networks.
DTYPES = (np.float64, np.float32)
# Training needs a number of steps on small tables, and a number of epochs on large ones.
LEAST_STEPS, LEAST_EPOCHS = 1000, 40


class UncertaintyArrays(NamedTuple):
    """Uncertainty of each row; the method that returns it defines the unit."""

    total: Array
    aleatoric: Array
    epistemic: Array


class BayesianEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of both estimators; parameters are stored as given and validated when fitting.

    Args:
        method: Name of a method in `credo.METHODS`; or `"auto"`: `credo.auto` holds out rows and chooses by them, with
            five times the epochs, and the evidence is in `posterior_.evidence`.
        hidden: Sizes of the hidden layers of a ReLU perceptron, if `model` is None.
        model: The network: a module, or a function (inputs, outputs) -> nn.Module.
        prior_precision: 1/variance of every weight before seeing data.
        temperature: Weight of the prior in the loss. 1 is the exact posterior; below 1 (a cold posterior) predictions
            are often better on small tables.
        lr: Learning rate; by default one that suits tables.
        epochs: Passes over the data; by default as many as give 1000 steps, at least 40.
        batch_size: Rows in a step.
        draws: Networks that a prediction averages over, the same ones in every call.
        method_options: Further arguments of the method's constructor.
        standardize: Scale inputs by mean and standard deviation of the training rows.
        early_stopping: Hold out rows and stop when their NLL no longer falls.
        validation_fraction: Fraction of the rows to hold out for early stopping.
        n_iter_no_change: Epochs without improvement before early stopping.
        random_state: Seed of initial weights, batches and draws; an integer makes results reproducible.
        verbose: 1 shows a progress bar.
    """

    # Default learning rates for tables, by an argument of the methods that they are for: those with a torch optimiser,
    # those with Kronecker factors. All other methods keep their own.
    _rates: ClassVar[Mapping[str, float]]

    def __init__(
        self,
        method: str = "bbb",
        *,
        hidden: Sequence[int] = (100,),
        model: Model = None,
        prior_precision: float = 10.0,
        temperature: float = 0.1,
        lr: float | None = None,
        epochs: int | None = None,
        batch_size: int = 64,
        draws: int = 100,
        method_options: Mapping[str, Any] | None = None,
        standardize: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        random_state: RandomState = None,
        verbose: int = 0,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.model = model
        self.prior_precision = prior_precision
        self.temperature = temperature
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.draws = draws
        self.method_options = method_options
        self.standardize = standardize
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.verbose = verbose

    posterior_: Posterior
    history_: list[EpochRecord]
    input_mean_: Array
    input_std_: Array
    n_features_in_: int

    def _fit(self, x: Array, y: Array, outputs: int, likelihood: Callable[[], Likelihood]) -> Self:
        """Train a posterior on validated inputs and on scaled targets."""
        self._check()
        self._seed = make_seed(self.random_state)
        self._dtype = x.dtype
        self.input_mean_, std = statistics(x, standardize=self.standardize)
        farthest = np.abs(x - self.input_mean_).max(0) if self.standardize else np.zeros_like(std)
        self.input_std_ = input_scale(torch.from_numpy(std), torch.from_numpy(farthest).to(torch.float64)).numpy()
        examples, held_out = self._split(Split(self._inputs(x), torch.from_numpy(y)))
        loader = Batches(examples, batch_size=self.batch_size, seed=self._seed)
        precision = torch.from_numpy(np.empty(0, x.dtype)).dtype
        if self.method == "auto":
            return self._choose(self._network(outputs, self._seed).to(precision), loader, likelihood().to(precision))
        posterior = make_posterior(
            self.method,
            self.method_options or {},
            Common(len(examples), len(loader), self.lr, self._rates, self.prior_precision, self.temperature),
            network=lambda seed: self._network(outputs, seed).to(precision),
            likelihood=lambda: likelihood().to(precision),
            seed=self._seed,
        )
        if process_count() > 1:  # every process fits its own estimator
            distribute(posterior, independent=True)
        self.history_ = self._train(posterior, loader, held_out)
        self.posterior_ = posterior.eval()
        return self

    def _choose(self, network: nn.Module, loader: Batches, likelihood: Likelihood) -> Self:
        """Let `credo.auto` choose the method, with the passes of five trainings."""
        options: dict[str, Any] = {"seed": self._seed, "progress": bool(self.verbose)}
        self.posterior_ = auto(network, loader, passes=5 * self._epochs(loader), likelihood=likelihood, **options)
        self.history_ = []
        return self

    def _epochs(self, loader: Batches) -> int:
        return max(LEAST_EPOCHS, -(-LEAST_STEPS // len(loader))) if self.epochs is None else int(self.epochs)

    def _check(self) -> None:
        counts = {name: getattr(self, name) for name in ("batch_size", "draws", "n_iter_no_change")}
        if self.epochs is not None:
            counts["epochs"] = self.epochs
        for name, value in counts.items():
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")
        if not _is_number(self.prior_precision) or self.prior_precision <= 0:
            raise ValueError(f"prior_precision={self.prior_precision!r} must be positive and finite: 1/variance.")
        if not _is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature!r} must be finite and not negative.")

    def _network(self, outputs: int, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module) and METHODS.get(self.method) is Ensemble:
            raise ValueError(
                "Ensemble members must start from different weights: give model= as a function "
                "(inputs, outputs) -> nn.Module instead of one module."
            )
        return make_network(self.model, self.hidden, self.n_features_in_, outputs, seed=seed)

    def _split(self, examples: Split) -> tuple[Split, Split | None]:
        if not self.early_stopping:
            return examples, None
        fraction, total = float(self.validation_fraction), len(examples)
        if not 0 < round(fraction * total) < total:
            raise ValueError(
                f"validation_fraction={fraction} of n_samples={total} leaves no row to train on or none to validate "
                "with; choose another fraction, or early_stopping=False."
            )
        by_class = not examples.y.is_floating_point()
        return split_validation(examples, size=fraction, seed=self._seed, stratify=by_class)

    def _train(self, posterior: Posterior, loader: Batches, held_out: Split | None) -> list[EpochRecord]:
        options: dict[str, Any] = {"epochs": self._epochs(loader), "schedule": "cosine", "seed": self._seed}
        if held_out is not None:
            validation = Batches(held_out, batch_size=1024, shuffle=False)
            options |= {"validation": validation, "patience": int(self.n_iter_no_change)}
        if not self.verbose:
            return list(train(posterior, loader, **options))
        return list(shown(posterior, loader, description=type(self).__name__, **options))

    def _inputs(self, x: Array) -> Tensor:
        return torch.from_numpy(((x - self.input_mean_) / self.input_std_).astype(self._dtype))

    def _predict(self, x: ArrayLike) -> Any:
        """Predict unscaled inputs, with the same draws in every call."""
        check_is_fitted(self)
        rows = self._inputs(validate_data(self, x, reset=False, dtype=DTYPES))
        return predict(self.posterior_, rows, draws=self.draws, shared_draws=True, seed=self._seed)

    def _conform(self, x: Array, y: Array, alpha: float, kind: str, options: Mapping[str, Any]) -> Self:
        """Choose conformal thresholds with the draws of all predictions; targets are scaled."""
        rows = [(self._inputs(x), torch.from_numpy(y))]
        how: dict[str, Any] = {"draws": self.draws, "shared_draws": True, "seed": self._seed}
        conformal(self.posterior_, rows, alpha, kind, **how, **options)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        of = (self.method_options or {}).get("of")
        # Dropout masks differ from row to row, so a prediction depends on the other rows of the call.
        tags.non_deterministic = "mc-dropout" in (self.method, of.get("name") if isinstance(of, Mapping) else None)
        return tags


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def statistics(values: Array, *, standardize: bool) -> tuple[Array, Array]:
    """Mean and standard deviation of each column, 1 where it is constant; 0 and 1 if not `standardize`."""
    if not standardize:
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    scaler = StandardScaler().fit(values)
    return scaler.mean_, scaler.scale_
