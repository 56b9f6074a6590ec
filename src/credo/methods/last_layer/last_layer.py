"""A Bayesian last layer: the features of the rest of the network are trained, the weights behind them integrated out.

For Gaussian noise it is Bayesian linear regression on the features φ, exact (`conjugate.py`; MacKay 1992): mean and
covariance of the weights, the predictive distribution, the evidence, by which noise and prior are chosen. For classes
it is the Gaussian that maximises a bound of the evidence (`class_bound.py`). Training finds φ, as MAP does; one pass
over the data after it finds the posterior, whose mean then is in the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.errors import CredoError, NonFiniteError, UnsupportedModelError, unknown
from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise, Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import AnyInputs, Forward, Target
from credo.core.network.selection import all_names, join
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import GradientPosterior, OptimizerStep, trainable
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Terms
from credo.core.prior import Gaussian, Prior, Value, make_prior, one_prior
from credo.core.thread_safety import changes_weights, checked_once
from credo.methods.laplace.last_layer import LastLayer as OutputLayer
from credo.methods.laplace.last_layer import find_last_layer
from credo.methods.last_layer.conjugate import LayerPrior
from credo.methods.last_layer.layer_posterior import ClassPosterior, ConjugatePosterior, LayerPosterior
from credo.methods.pass_file import Saving
from credo.methods.training_pass import checked_pair, found_in_pass, training_pass, warn_of_data_size


class LastLayer(GradientPosterior):
    """The exact posterior of the network's last linear layer, given the features that the rest computes.

    For a network that is trained already, `LastLayer(model, data_size=N).fit(loader)` makes one pass over the training
    data: it puts the posterior mean into the layer and leaves all else as it is. `credo.fit` trains the network first,
    as MAP does. `update_(x, y)` adds data later. Before a pass, and after any further step, all draws are the mean.

    The layer's uncertainty is all there is: that of the features is left out, and so is most of what a network does not
    know far from its data. Predictions need no draws. For classes, all classes share the covariance of their weights.

    Args:
        model: The network; its output must be that of an `nn.Linear`.
        data_size: Number of training examples, which log p(w) is divided by in training.
        layer: Name of that `nn.Linear` in the network; None: the last one.
        prior: The Gaussian prior of the layer's weights: an object, its standard deviation or its description. None: no
            prior in training, and after it the precision that maximises the evidence (for classes, its bound).
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: `GaussianNoise` (not heteroscedastic), `Categorical` (None) or `Bernoulli`. A
            learned noise, one for all outputs or one for each, is the one that maximises the evidence.
        seed: Start of the posterior's own random numbers.
    """

    default_predictive: ClassVar[str] = "linear"
    needs_training: ClassVar[bool] = False
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2)}
    _not_in_config = ("prior_precision",)
    _renamed_arguments: ClassVar[Renamed] = RENAMED_OPTIMIZER
    prior: Gaussian | None
    gaussian: LayerPosterior

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        layer: str | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 1e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self.last = _output_layer(model, layer)
        names = [name for name in (self.last.weight, self.last.bias) if name is not None]
        self.layout = Layout(parameters_at(model, names), least=torch.float32, known=all_names(model))
        outputs = int(self.layout.shapes[self.last.weight][0])
        _check_likelihood(self.likelihood, outputs)
        kind = ConjugatePosterior if isinstance(self.likelihood, GaussianNoise) else ClassPosterior
        self.gaussian = kind(self.layout.size // outputs, outputs, self.device)
        self.register_module("prior", None)
        given = one_prior(prior, prior_precision)
        if given is not None:
            self.prior = self._bound_prior(given)
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    # -- q(w) = N(m, S) for each output -------------------------------------------------------------------------------

    @property
    def has_curvature(self) -> bool:
        """Whether a pass over the data has been made since the last step."""
        return bool(self.gaussian.rows > 0)

    @property
    def is_random(self) -> bool:
        """Whether draws differ: not before a pass."""
        return self.has_curvature

    @property
    def uncertainty_needs(self) -> str:
        """A pass over the data, unless there was one since the last step."""
        return "" if self.has_curvature else "a pass over the training data: posterior.fit(loader)"

    @torch.no_grad()
    def draw(self) -> dict[str, Tensor]:
        """Weight and bias of the layer; `{}`, the mean, before a pass."""
        if not self.has_curvature:
            return {}
        noise = self.last.split(self.gaussian.noise(self.generator).T)
        return {name: p.detach() + noise[name].to(p.dtype) for name, p in self._means().items()}

    def mean(self) -> dict[str, Tensor]:
        """Copies of the layer's own weight and bias."""
        return {name: p.detach().clone() for name, p in self._means().items()}

    @torch.no_grad()
    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each weight by itself; zero before a pass."""
        if not self.has_curvature:
            return {name: torch.zeros_like(p) for name, p in self._means().items()}
        stds = self.last.split(self.gaussian.weight_variance().sqrt().T)
        return {name: std.to(self.layout.dtypes[name]).contiguous() for name, std in stds.items()}

    @torch.no_grad()
    def function_moments(self, x: AnyInputs, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
        """Moments of the network's outputs over the posterior, exact: they are linear in the layer's weights.

        Returns the means [batch, outputs] and the covariance [batch, outputs, outputs], a diagonal one, zero before a
        pass; calibrated predictions scale it by `noise_scale`².

        Args:
            x: Inputs of one batch.
            diagonal: Give the variances [batch, outputs] alone.
        """
        with self.snapshot(training=False) as frozen:
            outputs, features = frozen._features(x)
            outputs = outputs.reshape(len(x), -1)
            size = outputs.shape[1]
            if not frozen.has_curvature:
                return outputs, outputs.new_zeros(len(x), *[size] * (1 if diagonal else 2))
            covariance = frozen.gaussian.feature_covariance(features, size, diagonal=diagonal)
            return outputs, (frozen.noise_scale**2 * covariance).to(outputs.dtype)

    @property
    def feature_gaussian(self) -> LayerPosterior:
        """What has the covariance of the outputs, given the layer's inputs."""
        return self.gaussian

    def _means(self) -> dict[str, nn.Parameter]:
        return parameters_at(self.model, self.layout.names)

    # -- training: φ ----------------------------------------------------------------------------------------------

    def _update(self, terms: Terms) -> Terms:
        if self.has_curvature:
            self.gaussian.reset_()  # it was the posterior for other features
        return super()._update(terms)

    # -- the pass over the data ---------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        forward: Forward | None = None,
        target: Target | None = None,
        checkpoint: Path | str | None = None,
        checkpoint_minutes: float | None = 10.0,
        checkpoint_every: int | None = None,
    ) -> Self:
        """Find the posterior of the layer for the features as they are, and put its mean there; returns itself.

        The pass runs in eval mode. For classes, the features of all rows are held in memory.

        Args:
            loader: The training batches, (inputs, targets); those of this process if there are several.
            progress: Show a progress bar; only on an interactive terminal.
            forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in
                `credo.predict`.
            target: `target(batch)` returns the targets; None: by the form of the batch.
            checkpoint: A file for the sums so far: the same call resumes a pass that was killed, with the same result
                bit for bit. It is removed at the end.
            checkpoint_minutes: Minutes between two writes of it; None: none by time.
            checkpoint_every: Also write it after every so many batches.
        """
        saving = Saving(checkpoint, checkpoint_minutes, checkpoint_every)
        options: Any = {"progress": progress, "forward": forward, "target": target, "saving": saving}
        with training_pass(self, loader, **options) as batches:
            self._find(batches)
        advice = "the posterior is that of these. Give fit() the training data, and data_size their number."
        warn_of_data_size(self, float(self.gaussian.rows), "the pass saw", advice)
        return self

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Find the posterior of the layer.

        Args:
            loader: The training batches, those of this process if there are several.
        """
        self._find(loader)

    def update_(self, x: AnyInputs, y: Tensor) -> None:
        """Add examples to the posterior: noise and prior stay as they are (at first, an open prior is N(0, 1)).

        For Gaussian noise the result is that of one pass over all data, to rounding. For classes the posterior so far
        is the prior of the new examples, and what it loses is not found again.

        Args:
            x: Inputs of the new examples; those of this process if there are several.
            y: Their targets.
        """
        self._find(self._remembered([(x, y)]), adds=True)

    @checked_once
    @changes_weights
    def _find(self, batches: Iterable[Any], *, adds: bool = False) -> None:
        stale = "the features are not those of the network"
        with found_in_pass(self, batches, self._gathered, stale=stale) as found, torch.no_grad():
            self._take(found, adds=adds)

    def _gathered(self, batches: Iterable[Any]) -> Any:
        """What the posterior depends on, of all processes."""
        group = self.process_group
        with ExitStack() as stack:
            with torch.no_grad():  # copies that are no part of a graph
                frozen = stack.enter_context(self.snapshot(training=False))
            stack.enter_context(nullcontext() if group is None else group.watched())
            return self.gaussian.gathered(batches, frozen._examples, group)

    @torch.no_grad()
    def _examples(self, index: int, batch: Any) -> tuple[Tensor, Tensor]:
        """Features and targets of the rows of a batch that count."""
        x, y = checked_pair(batch, self.device)
        outputs, features = self._features(x)
        if not bool(self.likelihood.nll(outputs, y).isfinite()):  # which also validates the targets
            message = (
                f"The loss of batch {index} of the pass is NaN or infinite: check the network's weights, and the "
                "inputs and targets of this batch."
            )
            if self.process_group is not None:  # the others do not know
                self.process_group.close(message)
            raise NonFiniteError(message)
        features = features.to(self.gaussian.dtype)
        if isinstance(self.likelihood, GaussianNoise):
            return features, y
        labels = y.reshape(len(x)).long()
        if not bool((labels == y.reshape(len(x))).all()):
            raise ValueError("LastLayer needs labels that are whole numbers, got others in a batch: round them.")
        counts = labels >= 0  # of those below, the likelihood lets −100 pass, which is to be ignored
        return features[counts], labels[counts]

    def _features(self, x: AnyInputs) -> tuple[Tensor, Tensor]:
        """Outputs of the network, and features [batch, features] with a 1 for the bias, if there is one."""
        found = self.last.features(self.model, x)
        if found is None:
            where = f"its nn.Linear {self.last.path!r}" if self.last.path else "the layer itself"
            raise UnsupportedModelError(
                f"LastLayer: the output of {type(self.model).__name__} must be that of {where}, run once, on one row "
                "for each input, with no function such as a softmax behind it. If another nn.Linear gives the output, "
                "name it: layer='head'."
            )
        return found

    def _take(self, found: Any, *, adds: bool) -> None:
        """Find the posterior, and put its mean into the network; an error leaves all as it was."""
        prior, likelihood, mean = self._layer_prior(), self.likelihood, self._matrix()
        parameters = [*self._means().values(), *likelihood.parameters()]
        before, buffers = [p.clone() for p in parameters], dict(self.gaussian.named_buffers())
        try:
            if adds:
                mean = self.gaussian.add_(found, mean, prior, likelihood)
            else:
                mean = self.gaussian.fit_(found, mean, prior, likelihood, is_open=self.prior is None)
            self._set_mean(mean)
            if self.process_group is not None:  # rounding may differ between machines
                self.process_group.broadcast_([*parameters, *self.gaussian.state_dict().values()])
            self._refresh()
        except BaseException:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
            for name, buffer in buffers.items():
                setattr(self.gaussian, name, buffer)
            raise

    def _set_mean(self, matrix: Tensor) -> None:
        means = self._means()
        for name, value in self.last.split(matrix.T).items():
            means[name].copy_(value)

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.has_curvature:
            self.gaussian.refresh_(self._layer_prior(), self.likelihood)

    def _matrix(self) -> Tensor:
        """The layer's weights as they are, [features, outputs], the bias as the last feature's."""
        flat = self.layout.flatten(self._means()).detach().to(self.gaussian.dtype)
        return self.last.matrix(flat, self.gaussian.outputs).T

    def _layer_prior(self) -> LayerPrior:
        """The prior's means and precisions, [features, outputs]."""
        flat = torch.ones(self.layout.size, dtype=self.gaussian.dtype, device=self.gaussian.gram.device)
        mean, std = (0.0, 1.0) if self.prior is None else (self.prior.mean, self.prior.std)
        values = (flat * mean, flat * std**-2)
        return LayerPrior(*(self.last.matrix(value, self.gaussian.outputs).T for value in values))

    def _bound_prior(self, prior: Prior | Mapping[str, Any] | float) -> Gaussian:
        bound = make_prior(prior).bind(self.layout, data_size=self.data_size, device=self.device)
        if type(bound) is not Gaussian:
            raise ValueError(f"LastLayer needs a Gaussian prior; got {type(bound).__name__}.")
        return bound

    # -- inspection ---------------------------------------------------------------------------------------------------

    def log_marginal_likelihood(self) -> float:
        """log p(targets | features) in nats: exact for Gaussian noise, for classes a lower bound.

        The features were trained on these data, which it does not count. After `update_`, that of classes is only about
        a bound.
        """
        if not self.has_curvature:
            raise CredoError("There is no posterior yet, or a step has been made since: call fit(loader) first.")
        return self.gaussian.log_evidence(self._layer_prior(), self.likelihood)

    def describe(self) -> Description:
        """The prior, given or chosen, and the size of the covariance; only a given one enters the loss."""
        chosen = Gaussian(0.0, float(self.gaussian.alpha) ** -0.5) if self.has_curvature else None
        return Description(
            prior=self.prior or chosen,
            layout=self.layout,
            has_prior=self.prior is not None,
            spread_count=self.gaussian.basis.numel() + self.gaussian.variances.numel(),
            has_curvature=self.has_curvature,
        )


def _after_loading(posterior: nn.Module, _: Any) -> None:
    assert isinstance(posterior, LastLayer)
    posterior._refresh()


def _output_layer(model: nn.Module, path: str | None) -> OutputLayer:
    """The `nn.Linear` of this name, or the last one; raises UnsupportedModelError if it cannot be the last layer."""
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    kind = type(model).__name__
    if not layers:
        raise UnsupportedModelError(f"LastLayer needs a network whose output is that of an nn.Linear; {kind} has none.")
    if path is not None and path not in layers:
        raise ValueError(unknown("nn.Linear in layer=", path, layers))
    path = [*layers][-1] if path is None else path
    found = find_last_layer(model, [join(path, key) for key, p in layers[path]._parameters.items() if p is not None])
    if found is None:
        raise UnsupportedModelError(
            f"LastLayer: the weights of {path!r} in {kind} are shared with another layer, or computed from other "
            "parameters, as weight norm does. It needs an nn.Linear with weights of its own."
        )
    return found


def _check_likelihood(likelihood: Likelihood, outputs: int) -> None:
    kind = type(likelihood)
    if kind is GaussianNoise and not likelihood.heteroscedastic:
        return
    if kind not in (Categorical, Bernoulli):
        given = "GaussianNoise(heteroscedastic=True)" if kind is GaussianNoise else kind.__name__
        raise ValueError(
            f"LastLayer has no closed form for {given}: possible are GaussianNoise with a noise that does not depend "
            "on the input, Categorical and Bernoulli. For others, use Laplace."
        )
    if kind is Categorical and outputs < 2:
        raise ValueError(f"The network has {outputs} output, and Categorical needs one for each class: use Bernoulli.")
