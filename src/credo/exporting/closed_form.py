"""A posterior of a last layer as one module without draws: the moments of its outputs, put through the likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.held_out.calibration import Calibration
from credo.core.network.inputs import as_inputs, output_tensor
from credo.core.posterior import Posterior
from credo.exporting.graph import CLASS_OUTPUTS, VALUE_OUTPUTS, arguments
from credo.predict.closed_form import ClassForm, FunctionValues, GaussianForm, form_of, has_closed_form
from credo.predict.function_points import averages_at
from credo.predict.moments import widened


class ClosedFormGraph(nn.Module):
    """Predicts as `credo.predict` does by default for a posterior of a last layer: exact moments, no draws.

    Args:
        posterior: A private copy in eval mode, all of whose parts have a Gaussian last layer.
        form: What puts the moments of function values through the likelihood.
        keys: Names of the inputs of a network that is called by keyword.
    """

    draws = 0

    def __init__(self, posterior: Posterior, form: ClassForm | GaussianForm, keys: Sequence[str] = ()) -> None:
        super().__init__()
        self.keys = tuple(keys)
        self.parts = nn.ModuleList(_LastLayerMoments(part, self.keys) for part in posterior.parts)
        self.likelihoods = nn.ModuleList(part.likelihood for part in posterior.parts)
        self.form, self.dtype, self.calibration = form, form.dtype, form.calibration
        if isinstance(form, ClassForm):
            classes = 2 if form.is_binary else form.shape.numel()
            self.register_buffer("points", form.points(len(posterior.parts), classes).to(posterior.device))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what `forward` returns."""
        return CLASS_OUTPUTS if isinstance(self.form, ClassForm) else VALUE_OUTPUTS

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The prediction of one batch, four tensors."""
        pairs = [part(*inputs) for part in self.parts]
        mean, spread = (torch.stack([widened(pair[side]) for pair in pairs]) for side in (0, 1))
        values = FunctionValues(mean, spread * self.calibration.noise_scale**2)
        found = self._classes(values) if isinstance(self.form, ClassForm) else self._values(values)
        return tuple(each.to(self.dtype) for each in found)

    def _classes(self, values: FunctionValues) -> tuple[Tensor, ...]:
        """Probabilities by the link, their entropy, the mean entropy of single functions, and the difference."""
        form, temperature = self.form, self.calibration.temperature
        assert isinstance(form, ClassForm)
        logits = form.logits(values, temperature)
        each = [
            averages_at(mean, traced_root(spread), self.get_buffer("points"))[0].mean(-1)
            for mean, spread in zip(logits.mean.unbind(), logits.spread.unbind(), strict=True)
        ]
        log_probs = form.log_probs(values, temperature)
        probs = log_probs.exp()
        total = -(probs * log_probs.clamp_min(-1e3)).sum(-1)
        aleatoric = torch.minimum(torch.stack(each).mean(0), total)
        return probs, total, aleatoric, total - aleatoric

    def _values(self, values: FunctionValues) -> tuple[Tensor, ...]:
        """Means, and standard deviations: total, of the noise, and of the means."""
        form = self.form
        assert isinstance(form, GaussianForm)
        variances = values.spread.diagonal(dim1=-2, dim2=-1)
        mean, noise, epistemic = form.averaged(FunctionValues(values.mean, variances))
        return mean, (noise.square() + epistemic.square()).sqrt(), noise, epistemic


class _LastLayerMoments(nn.Module):
    """Means and covariance of the outputs of one part, from one pass of its network.

    Args:
        part: The part.
        keys: Names of the network's inputs, if it is called by keyword.
    """

    def __init__(self, part: Any, keys: Sequence[str]) -> None:
        super().__init__()
        self.keys = keys
        self.model, self.gaussian = part.model, part.feature_gaussian
        self.path, self.has_bias = part.last.path, part.last.bias is not None
        for module in self.gaussian.modules():  # the file needs what predictions read, in the usual order
            roots = getattr(module, "roots", ())
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.contiguous() if buffer is not None and name in roots else None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means [batch, outputs] and covariance [batch, outputs, outputs]."""
        seen: list[Tensor] = []
        handle = self.model.get_submodule(self.path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        args, named = arguments(inputs, self.keys)
        try:
            outputs = output_tensor(self.model(*args, **named)).flatten(1)
        finally:
            handle.remove()
        features = seen[0]
        if self.has_bias:
            features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        return outputs, self.gaussian.feature_covariance(features, outputs.shape[1]).to(outputs)


def closed_form_graph(
    posterior: Posterior, inputs: Sequence[Tensor], keys: Sequence[str] = ()
) -> ClosedFormGraph | None:
    """The graph of a posterior whose predictions have a closed form that needs a last layer alone; else None.

    Args:
        posterior: A private copy in eval mode, which is used up.
        inputs: Those of a batch.
        keys: Their names, if the network is called by keyword.
    """
    parts: Sequence[Any] = posterior.parts
    args, named = arguments(tuple(inputs), keys)
    x = as_inputs(named or (args[0] if len(args) == 1 else args))
    gaussians = [getattr(part, "feature_gaussian", None) for part in parts]
    if posterior.default_predictive != "linear" or None in gaussians or not has_closed_form(posterior, None, x):
        return None
    found = [part.last.features(part.model, x) for part in parts]
    if None in found:
        return None
    posterior.calibration = posterior.calibration or Calibration()
    form = form_of(posterior, found[0][0][0], None)
    assert isinstance(form, ClassForm | GaussianForm)
    if isinstance(form, ClassForm) and form.needs_draws:
        return None
    return ClosedFormGraph(posterior, form, keys)


def traced_root(covariance: Tensor) -> Tensor:
    """A with A·Aᵀ = covariance, [batch, n, n] of any rank: a Cholesky factor by products that every runtime has."""
    least = 1e-14 * covariance.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp_min(1e-30)
    rest, columns = covariance, []
    for index in range(covariance.shape[-1]):
        pivot = rest[:, index, index].unsqueeze(-1)
        column = rest[:, :, index] * torch.where(pivot > least, pivot.clamp_min(1e-300).rsqrt(), 0.0)
        columns.append(column)
        rest = rest - column.unsqueeze(-1) * column.unsqueeze(-2)
    return torch.stack(columns, -1)
