"""Laplace's approximation: a Gaussian around trained weights θ*, with the curvature of the loss as its precision.

    q(θ) = N(θ*, P⁻¹),    P = H/T + P₀,    H = Σ JᵀΛJ over the data,

J the Jacobian of the outputs by the random weights, Λ the Fisher matrix of the outputs (diag(p) − ppᵀ of classes,
1/σ² of a regression), P₀ the prior's precision and T the temperature (MacKay 1992; Ritter et al. 2018; Immer et al.
2021; Daxberger et al. 2021). Training finds θ*, as MAP does; one pass over the data after it finds H.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.errors import UnsupportedModelError
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import AnyInputs, Forward, Target, run_network
from credo.core.network.selection import Random, all_names, one_device, random_names
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import OptimizerStep, trainable
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Terms
from credo.core.prior import Prior, Value, one_prior
from credo.core.support.validate import checked_count
from credo.core.thread_safety import changes_weights, checked_once
from credo.methods.laplace.all_weights import AllWeights
from credo.methods.laplace.data_pass import Totals, has_one_noise, pass_over
from credo.methods.laplace.evidence import Evidence
from credo.methods.laplace.jacobians import jacobian_chunks
from credo.methods.laplace.last_layer import find_last_layer
from credo.methods.laplace.make import check_choices, make_structure
from credo.methods.laplace.prior_choice import PriorChoice
from credo.methods.laplace.sources import Passes
from credo.methods.laplace.structures import Diagonal, Structure
from credo.methods.likelihood_fit import FIT_EXAMPLES, fit_likelihood_, restored_on_error, warn_if_unlike
from credo.methods.pass_file import Saving
from credo.methods.training_pass import first_rows, found_in_pass, training_pass, warn_of_data_size


class Laplace(PriorChoice):
    """A Gaussian around the weights of a trained network; by default of its last layer, and nothing else is random.

    For a network that is trained already, `Laplace(model, data_size=N).fit(loader)` makes one pass over the training
    data and changes no weight. `credo.fit` trains the network first, as MAP does. Before a pass, and after any further
    step, there is no curvature, and all draws are the mean. The pass runs in eval mode, and BatchNorm's affine
    parameters are points.

    Predictions linearise the network (`credo.predict`): drawn weights of a network that was not trained under noise
    often predict much worse than their mean.

    Args:
        model: The network; its parameters are the mean.
        data_size: Number of training examples; if the pass sees another number, the curvature is scaled to this one.
        structure: What of the curvature H is kept: `"kron"`, two Kronecker factors for each linear or convolution layer
            (all others, such as embeddings, transposed convolutions and recurrent layers, have the diagonal); `"diag"`;
            `"full"`, all of it, for some thousands of weights; `"low-rank"`, its largest eigenpairs and the diagonal.
        random: Which parameters are random, as in `random_names`. Those of an `nn.Linear` whose output is the network's
            need no backward pass, however many classes there are.
        prior: The Gaussian prior of the random parameters: an object, its standard deviation or its description. None:
            no prior in training, and the precision that maximises the evidence after it.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        curvature: `"ggn"`, exact, with a backward pass for each output; `"sampled"`, one for a label that the network
            itself draws, right on average; `"empirical"`, one for the true label.
        rank: Eigenpairs of `"low-rank"`.
        temperature: T; below 1 the data count more, and the posterior is narrower.
        evidence: How the prior is chosen where none is given: an `Evidence`, a mapping of its fields, or groups of
            weights that share a precision: `"one"`, `"layer"` or `"tensor"`.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: an object, its description or name; None: categorical. A learned noise that
            all outputs share is found anew by the evidence in each pass.
        seed: Start of the posterior's own random numbers.
    """

    default_predictive: ClassVar[str] = "linear"
    needs_training: ClassVar[bool] = False
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2)}
    _not_in_config = ("prior_precision",)
    _renamed_arguments: ClassVar[Renamed] = RENAMED_OPTIMIZER

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        structure: str = "kron",
        random: Random = "last",
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        curvature: str = "ggn",
        rank: int = 20,
        temperature: float = 1.0,
        evidence: Evidence | Mapping[str, Any] | str = Evidence(),
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 1e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        check_choices(structure, curvature, temperature, self.likelihood)
        self.curvature, self.temperature, self.prior_evidence = curvature, float(temperature), Evidence.of(evidence)
        names = random_names(model, random)
        self.arguments["random"] = names
        chosen = parameters_at(model, names)
        self.layout = Layout(chosen, least=torch.float32, known=all_names(model))
        self.last = find_last_layer(model, names)
        self._fits_alone = {*names} >= {*random_names(model, "all")}
        device, rank = one_device(chosen), checked_count("rank", rank, what="eigenpairs")
        self.structure = make_structure(structure, model, self.layout, self.last, device, rank)
        self.register_buffer("totals", torch.zeros(4, dtype=torch.double, device=device))
        self.register_module("prior", None)
        given = one_prior(prior, prior_precision)
        self.chooses_prior = given is None or self.prior_evidence.every is not None
        if given is not None:
            self.prior = self._bound(given)
            self.structure.check_prior(self.precision)
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    # -- q(θ) = N(θ*, P⁻¹) --------------------------------------------------------------------------------------------

    @property
    def is_random(self) -> bool:
        """Whether draws differ: not without a curvature."""
        return self.has_curvature

    @property
    def uncertainty_needs(self) -> str:
        """A pass over the data, unless there was one since the last step."""
        return "" if self.has_curvature else "a pass over the training data: posterior.fit(loader)"

    @torch.no_grad()
    def draw(self) -> dict[str, Tensor]:
        """Means plus noise of covariance P⁻¹; `{}`, the mean, without a curvature."""
        if not self.has_curvature:
            return {}
        noise = self.layout.split(self.structure.noise(self.generator))
        return {name: p.detach() + noise[name] for name, p in self._means().items()}

    def mean(self) -> dict[str, Tensor]:
        """Copies of the network's own random parameters."""
        return {name: p.detach().clone() for name, p in self._means().items()}

    @torch.no_grad()
    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each random weight by itself; zero without a curvature."""
        if not self.has_curvature:
            return {name: torch.zeros_like(p) for name, p in self._means().items()}
        return {name: v.clone() for name, v in self.layout.split(self.structure.variance().sqrt()).items()}

    @torch.no_grad()
    def function_moments(self, x: AnyInputs, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
        """Moments of the linearised network f(x) + J(x)(θ − θ*) over the posterior.

        Returns the network's outputs [batch, outputs], those of more than one dimension flattened, and their covariance
        [batch, outputs, outputs], zero without a curvature; calibrated predictions scale it by `noise_scale`².

        Args:
            x: Inputs of one batch.
            diagonal: Give the variances [batch, outputs] alone, without ever making a matrix of the outputs.
        """
        with self.snapshot(training=False) as frozen:
            return frozen._moments(x, diagonal)

    @property
    def feature_gaussian(self) -> Structure | None:
        """What has the covariance of the outputs, given the inputs of the last layer; None if others are random."""
        return None if self.last is None else self.structure

    def _moments(self, x: AnyInputs, diagonal: bool) -> tuple[Tensor, Tensor]:
        found = None if self.last is None else self.last.features(self.model, x)
        outputs = run_network(self.model, x.clone()) if found is None else found[0]
        outputs = outputs.reshape(len(x), -1)
        size = outputs.shape[1]
        if not self.has_curvature:
            return outputs, outputs.new_zeros(len(x), *[size] * (1 if diagonal else 2))
        if found is not None:
            covariance = self.structure.feature_covariance(found[1], size, diagonal=diagonal)
        else:
            chunks = jacobian_chunks(self.model, x, self._means(), outputs=size)
            covariance = torch.cat([self.structure.covariance(each, diagonal=diagonal) for _, _, each in chunks])
        return outputs, covariance.to(outputs) * self.noise_scale**2

    # -- training: θ* ----------------------------------------------------------------------------------------------

    def _penalty(self) -> Tensor:
        assert self.prior is not None
        weights = self.layout.flatten(self._means())
        return -self.prior.log_prob(weights) * (self.temperature / self.data_size)

    def _update(self, terms: Terms) -> Terms:
        self.totals.zero_()  # the curvature was that of other weights
        return super()._update(terms)

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune permanently, with `structure="diag"` only: in others, the remaining weights depend on the pruned ones.

        Args:
            masks: For each parameter which weights stay, by name.
        """
        if not isinstance(self.structure, Diagonal):
            raise UnsupportedModelError(
                "Laplace can be pruned with structure='diag' only: weights that depend on each other change if one is "
                "pruned."
            )
        self.optimizer_step.keep_({f"model.{name}": mask for name, mask in self._keep(masks).items()})
        self._refresh()

    # -- the pass over the data: H ------------------------------------------------------------------------------------

    @changes_weights
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
        """Find the curvature around the network's weights as they are, and what the evidence chooses; returns itself.

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
            fitted = None
            with restored_on_error(self.likelihood):
                if self.likelihood.unlearned and not has_one_noise(self.likelihood):  # that, the evidence finds
                    source = iter(batches)
                    rows = first_rows(self, source, FIT_EXAMPLES)
                    fitted = fit_likelihood_(self, rows)
                    batches = chain(rows, source)
                self._find(batches)
        warn_if_unlike(fitted, -float(self.totals[1]) / self.data_size)
        seen = float(self.totals[0])
        advice = (
            f"the curvature is scaled to that of {self.data_size:,}. Give data_size={seen:.0f}, the number of examples "
            "that training saw; to weight the data differently, set temperature."
        )
        warn_of_data_size(self, seen, "the pass saw", advice)
        return self

    def end_epoch_(self, loader: Iterable[Any], *, epoch: int, epochs: int) -> None:
        """Choose the prior by the evidence, if that is due during training.

        Args:
            loader: The training batches, those of this process if there are several.
            epoch: Number of epochs that are done.
            epochs: Number of epochs of the training.
        """
        if self.prior_evidence.is_due(epoch):
            self._find(loader)

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Find the curvature, unless the last epoch has.

        Args:
            loader: The training batches, those of this process if there are several.
        """
        if not self.has_curvature:
            self._find(loader)

    @checked_once
    def _find(self, batches: Iterable[Any]) -> None:
        stale = "its curvature is that of other weights"
        with found_in_pass(self, batches, self._summed, stale=stale) as (sums, totals, fitted):
            try:
                self.structure.set_(sums, totals.examples, float(self.data_size))
                found = astuple(totals.scaled(self.data_size / totals.examples))
                self.totals.copy_(torch.tensor(found, dtype=torch.double))
                if fitted is not None:
                    self._find_noise(*fitted)
                self._maximise_evidence(
                    self.prior_evidence.groups if self.chooses_prior else None, noise=fitted is None
                )
                self._refresh()
            except BaseException:
                self.totals.zero_()  # no curvature rather than half of one
                raise

    def _summed(self, batches: Iterable[Any]) -> tuple[dict[str, Tensor], Totals, tuple[Tensor, float] | None]:
        """Sums of the curvature and of all else; of all weights, if others were trained, what a noise depends on."""
        group = self.process_group
        seed = self.seed if group is None else group.seed_for(self.seed, self.steps)
        labels = torch.Generator(self.device).manual_seed(seed)
        with ExitStack() as stack:
            with torch.no_grad():  # copies that are no part of a graph
                frozen = stack.enter_context(self.snapshot(training=False))
            stack.enter_context(nullcontext() if group is None else group.watched())
            passes = Passes(frozen.model, self.layout, frozen.likelihood, self.curvature, self.last, labels)
            if self._fits_alone or not (has_one_noise(self.likelihood) and self.likelihood.learn):
                return *pass_over(self.structure, passes, batches, group), None
            weights = AllWeights(frozen.model)
            sums, totals = pass_over(self.structure, passes, weights.watch(batches), group)
            spectrum = weights.spectrum(self.device, group)
            return sums, totals, None if spectrum is None else (spectrum, weights.squares)

    def describe(self) -> Description:
        """Prior, temperature, and the numbers of the curvature's structure."""
        pruned = 0 if self.kept is None else int((~self._kept_weights()).sum())
        return Description(
            prior=self.prior,
            layout=self.layout,
            temperature=self.temperature,
            spread_count=self.structure.spread_count - pruned,
            has_curvature=self.has_curvature,
            evidence=self.log_marginal_likelihood if self.has_curvature else None,
            scale_prior=self.scale_prior_ if self.has_curvature else None,
        )


def _after_loading(posterior: nn.Module, _: Any) -> None:
    assert isinstance(posterior, Laplace)
    if posterior.has_curvature:
        posterior.structure.prepare_()
    posterior._refresh()
