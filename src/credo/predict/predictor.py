"""A fixed set of drawn networks that predicts batches of any size, for services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.kernels.attention import plain_attention, plain_attention_modules
from credo.core.network.inputs import AnyInputs, Forward, Target, read_batches, run_network
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.substitute import Draw, substituted
from credo.core.posterior import Posterior
from credo.core.sampling import noise_scaled, warn_if_unfitted
from credo.core.support.keywords import checked_keywords
from credo.core.support.loader_checks import pair_explained
from credo.core.support.validate import checked_count, checked_seed
from credo.predict.closed_form import has_closed_form, meant_link
from credo.predict.draw_loop import make_moments, run_draws
from credo.predict.kinds.conformal import conformed, warn_of_other_predictions
from credo.predict.moments import summable
from credo.predict.nonfinite import nonfinite_inputs, raise_or_mark
from credo.predict.recalibrated import recalibrated
from credo.predict.result import ClassPrediction, Prediction, concatenate
from credo.predict.run import Batch, batches_of, check_on_nonfinite, check_posterior, checked_predictive, predict

WAYS = ("auto", "loop", "vmap")
# Draws up to this size are kept in memory; larger ones are drawn again for each batch.
_MOST_BYTES = 2**30
# Up to so many entries of a batch one pass for all draws is faster: calls cost more than arithmetic.
_SMALL_BATCH = 2**15
# Raised by vmap for networks that it cannot run: recurrent layers, branches on values, in-place changes.
_IMPOSSIBLE = (RuntimeError, NotImplementedError, ValueError, TypeError)


@checked_keywords()
def predictor(
    posterior: Posterior,
    *,
    draws: int = 32,
    seed: int = 0,
    way: str = "auto",
    predictive: str | None = None,
    link: str | None = None,
) -> Predictor:
    """Draw `draws` networks once and return a `Predictor` that uses these networks, from any number of threads.

    It predicts as `predict(posterior, inputs, draws=draws, seed=seed, shared_draws=True)` does, but draws only once,
    and runs all networks in one pass where that is faster. The weights are copied: training that continues does not
    change its predictions.

    Args:
        posterior: Any posterior. MC-dropout has no networks to fix: its masks start from `seed` in every call.
        draws: Networks to average over. A mixture takes equally many of every member, rounded up; a point estimate is
            one network.
        seed: Seed of the random numbers.
        way: `"vmap"` runs all networks in one pass, `"loop"` one after the other. `"auto"` is `"vmap"` for small
            batches of networks that `torch.func.vmap` can run with the outputs of the loop, compared in the first call.
        predictive: `"weights"` or `"linear"`, as in `predict`; linear functions have no networks to keep.
        link: How linear logits become probabilities, as in `predict`.
    """
    return Predictor(posterior, draws=draws, seed=seed, way=way, predictive=predictive, link=link)


class Predictor:
    """Predicts with a fixed set of `draws` networks. Made by `predictor`, which describes the arguments.

    Args:
        posterior: Posterior to draw the networks from.
        draws: Number of networks.
        seed: Seed of the random numbers.
        way: `"auto"`, `"vmap"` or `"loop"`.
        predictive: `"weights"`, `"linear"` or None.
        link: As in `predict`.
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        draws: int,
        seed: int,
        way: str,
        predictive: str | None = None,
        link: str | None = None,
    ) -> None:
        check_posterior(posterior)
        warn_if_unfitted(posterior)
        if way not in WAYS:
            raise ValueError(unknown("way", str(way), WAYS))
        self.predictive, self.link = checked_predictive(posterior, predictive, link), link
        draws = checked_count("draws", draws)
        self.seed, self.way = checked_seed(seed), way
        self._original, self._posterior = posterior, posterior.frozen_copy().eval()
        self.calibration, self.conformal = self._posterior.calibration, self._posterior.conformal
        self._posterior.conformal = None  # sets and intervals are made here, of all batches
        self._posterior.guard.is_fixed = True
        self._noise_scale = 1.0 if self.calibration is None else self.calibration.noise_scale
        self._is_random = self._posterior.is_random and self._noise_scale != 0.0
        self.draws = self._posterior.whole_draws(draws if self._noise_scale != 0.0 else 1)
        is_closed = self.predictive == "linear" and has_closed_form(self._posterior, link)
        matters = draws if self._is_random and not is_closed else None
        given = {"draws": matters, "predictive": self.predictive, "link": link, "tolerance": None}
        warn_of_other_predictions(self.conformal, partial(meant_link, self._posterior), **given)
        self._kept = self._fixed_draws() if self.predictive == "weights" else None
        by_weights = all(type(part).activation_noise is Posterior.activation_noise for part in self._posterior.parts)
        self._stack = _stacked(self._kept) if way != "loop" and by_weights else None
        self._can_stack: bool | None = None if self._stack else False
        if way == "vmap" and self._stack is None:
            raise ValueError("way='vmap' needs draws that are sets of weights and fit into memory: use way='auto'.")

    @torch.no_grad()
    def __call__(
        self,
        inputs: Tensor | Mapping[str, Any] | Iterable[Any],
        *,
        forward: Forward | None = None,
        target: Target | None = None,
        batch_size: int = 1024,
        on_nonfinite: str = "raise",
    ) -> Any:
        """Predict a tensor or a mapping of inputs, or an iterable of batches, as `predict` does.

        Args:
            inputs: A tensor or a mapping of tensors, which is split into batches, or an iterable of batches.
            forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch.
            target: `target(batch)` returns the targets; None: by the form of the batch.
            batch_size: Rows per batch when `inputs` is a tensor or mapping.
            on_nonfinite: `"raise"` an error that lists the rows whose outputs are NaN or infinite, or `"mark"` them, as
                in `predict`.
        """
        check_on_nonfinite(on_nonfinite)
        batches = batches_of(read_batches(inputs, forward, target), checked_count("batch_size", batch_size))
        with pair_explained(inputs):
            return self._joined(batches, on_nonfinite)

    def _joined(self, batches: Iterable[Batch], on_nonfinite: str) -> Prediction:
        """The prediction of all batches."""
        parts: list[Prediction] = []
        bad_inputs: set[int] = set()
        row, are_finite = 0, True
        for x, y in batches:
            part = self._batch(x, y)
            finite = part.finite
            if not bool(finite.all()):
                are_finite = False
                bad_inputs |= nonfinite_inputs(x, finite, row)
            parts.append(part)
            row += len(part)
        prediction = concatenate(parts)
        if not are_finite:
            prediction = raise_or_mark(prediction, on_nonfinite, bad_inputs)
        if self.predictive == "weights":  # else `predict` has done so
            prediction = recalibrated(prediction, self.calibration)
        if self.draws > 1 and isinstance(prediction, ClassPrediction) and not self._is_random:
            prediction = replace(prediction, mc_error=torch.zeros_like(prediction.mc_error))
        return conformed(prediction, self.conformal)

    def _batch(self, x: AnyInputs, y: Tensor | None) -> Prediction:
        if isinstance(x, Tensor) and not len(x):
            raise ValueError("An empty batch cannot be predicted.")
        device = self._posterior.device
        x = x.to(device)
        y = None if y is None else y.to(device)
        try:
            return self._predicted(x, y)
        except NotIsolatedError:  # from the very first pass: a copy of the network would use the original's weights
            self._posterior = self._original
            self._original.guard.is_isolated = False
            return self._predicted(x, y)

    def _predicted(self, x: AnyInputs, y: Tensor | None) -> Prediction:
        if self.predictive == "linear":
            options: dict[str, Any] = {"draws": self.draws, "seed": self.seed, "link": self.link}
            options |= {"predictive": "linear", "shared_draws": True, "on_nonfinite": "mark"}
            batch = [x] if y is None else [(x, y)]
            return predict(self._posterior, batch, **options)  # type: ignore[no-any-return]
        outputs = self._outputs(x)
        likelihoods = [part.likelihood for part in self._posterior.parts]
        single = self.draws == 1 and not self._is_random
        return make_moments(likelihoods, summable(outputs), y, single=single, calibration=self.calibration).result()

    def _outputs(self, x: AnyInputs) -> Tensor:
        """Outputs [draws, batch, …] of all networks."""
        # Tensors of the copy never change: threads may share them.
        seed = self.seed if self._posterior.is_random else None
        with self._posterior.snapshot(seed=seed, copies="none") as view, noise_scaled(view, self._noise_scale):
            if view.training:  # the original itself, where no copy is possible
                view.eval()
            # Under `vmap` autocast has no effect: passes would be in single precision.
            wanted = self.way == "vmap" or x.numel() <= _SMALL_BATCH
            wanted = wanted and not torch.is_autocast_enabled(view.device.type)
            if wanted and self._stack is not None and self._can_stack is not False:
                outputs = self._together(view, x)
                if outputs is not None:
                    return outputs
            return self._one_by_one(view, x)

    def _one_by_one(self, view: Posterior, x: AnyInputs) -> Tensor:
        return run_draws(view, view.iter_draws(self.draws) if self._kept is None else self._kept, x)

    def _together(self, view: Posterior, x: AnyInputs) -> Tensor | None:
        """Outputs of all networks in one pass; None if `vmap` cannot run this network, or gives other outputs."""
        stack = self._stack
        assert stack is not None

        def one(weights: Draw) -> Tensor:
            substitution = substituted(view.model, weights, view._aliases)
            with substitution as net, plain_attention(), plain_attention_modules():  # which have batching rules
                return run_network(net, x.clone())

        if self._can_stack:
            return torch.func.vmap(one)(stack)
        plain = self._one_by_one(view, x)
        try:
            outputs = torch.func.vmap(one)(stack)
            same = outputs.shape == plain.shape
            self._can_stack = same and torch.allclose(outputs, plain, rtol=1e-3, atol=1e-4, equal_nan=True)
        except NotIsolatedError:
            raise
        except _IMPOSSIBLE as error:
            if self.way == "vmap":
                raise ValueError(f"way='vmap': torch.func.vmap cannot run this network ({error}).") from error
            self._can_stack = False
        if self.way == "vmap" and not self._can_stack:
            raise ValueError("way='vmap': this network has other outputs under torch.func.vmap; use way='auto'.")
        return outputs if self._can_stack else None

    def _fixed_draws(self) -> list[dict[str, Tensor]] | None:
        """The networks' weights; None if they are too large to keep, or draws are no weights (dropout masks)."""
        snapshot = self._posterior.snapshot(seed=self.seed, copies="none")
        with torch.no_grad(), snapshot as view, noise_scaled(view, self._noise_scale):
            size = sum(tensor.numel() * tensor.element_size() for tensor in view.draw().values())
            if not 0 < size * self.draws <= _MOST_BYTES:
                return None
            view.reseed_(self.seed)
            return list(view.iter_draws(self.draws))


def _stacked(draws: list[dict[str, Tensor]] | None) -> dict[str, Tensor] | None:
    """The weights of all draws, [draws, …] by name."""
    if draws is None or len(draws) < 2:
        return None
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
