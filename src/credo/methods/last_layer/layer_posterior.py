"""The Gaussian posterior of a layer's weights: natural parameters of the data, and the covariance that they give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.distributed.process_group import ProcessGroup
from credo.core.likelihood import MIN_STD, GaussianNoise, Likelihood
from credo.methods.laplace.structures import ReplacedBuffers
from credo.methods.last_layer.class_bound import ClassSolver
from credo.methods.last_layer.conjugate import LayerPrior, LinearData, Regression, rotated
from credo.methods.pass_file import rest_of

Examples = tuple[Tensor, Tensor]
Read = Callable[[int, Any], Examples]


class LayerPosterior(ReplacedBuffers, ABC):
    """Independent Gaussians N(m_k, B_k·diag(variances_k)·B_kᵀ) for the weights of each output k.

    The means m are in the network. Files hold what the data give; basis and variances are made of that by `refresh_`.
    Weights are matrices [features, outputs]; a bias is the weight of a last feature, which is 1.

    Args:
        features: Inputs of the layer, with that of the bias.
        outputs: Outputs of the layer.
        device: Where the network is.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("rows", "alpha")
    nonnegative_diagonals: ClassVar[tuple[str, ...]] = ("gram",)
    roots = ("basis", "variances")
    rows: Tensor
    gram: Tensor
    alpha: Tensor
    basis: Tensor
    variances: Tensor

    def __init__(self, features: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.outputs = outputs
        # Apple's graphics chips have no float64.
        self._options: dict[str, Any] = {
            "dtype": torch.float32 if device.type == "mps" else torch.float64,
            "device": device,
        }
        self._add_buffer("rows")  # number of examples; 0: there is no posterior
        self._add_buffer("gram", features, features)  # precision that the data add, up to the noise
        self._add_buffer("alpha")  # factor of the prior's precisions; 1 unless it is chosen
        self._add_buffer("basis", 1, features, features, persistent=False)  # [outputs or 1, features, features]
        self._add_buffer("variances", 1, features, persistent=False)  # [outputs or 1, features]
        self.reset_()

    def _add_buffer(self, name: str, *shape: int, persistent: bool = True) -> None:
        self.register_buffer(name, torch.zeros(shape, **self._options), persistent=persistent)

    @property
    def dtype(self) -> torch.dtype:
        """That of all of its numbers."""
        return self.gram.dtype

    # -- the covariance -----------------------------------------------------------------------------------------------

    def variance(self, features: Tensor) -> Tensor:
        """Variances of the outputs, [rows, outputs or 1], for features [rows, features]."""
        if len(self.basis) == 1:
            return (features @ self.basis[0]).square() @ self.variances.T
        return (torch.einsum("nd,kdj->nkj", features, self.basis).square() * self.variances).sum(-1)

    def feature_covariance(self, features: Tensor, outputs: int, *, diagonal: bool = False) -> Tensor:
        """Covariance of the outputs, [rows, outputs, outputs], for features [rows, features].

        Args:
            features: Inputs of the layer.
            outputs: How many outputs there are.
            diagonal: Only its diagonal, [rows, outputs].
        """
        variances = self.variance(features.to(self.basis)).expand(-1, outputs)
        return variances if diagonal else variances.diag_embed()

    def weight_variance(self) -> Tensor:
        """Variance of each weight, [features, outputs]."""
        return rotated(self.variances.expand(self.outputs, -1), self.basis.square().mT).T

    def noise(self, generator: torch.Generator) -> Tensor:
        """A draw of the weights about their means, [features, outputs]."""
        shape = (self.outputs, len(self.gram))
        white = torch.randn(shape, generator=generator, device=self.gram.device, dtype=self.dtype)
        return rotated(white * self.variances.sqrt(), self.basis.mT).T

    def reset_(self) -> None:
        """Forget all data."""
        for name, buffer in self.state_dict().items():
            setattr(self, name, torch.zeros_like(buffer))
        self.alpha = torch.ones_like(self.alpha)

    # -- the data -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def gathered(self, batches: Iterable[Any], read: Read, group: ProcessGroup | None) -> Any:
        """What the posterior depends on, of all batches of all processes.

        Args:
            batches: Those of this process.
            read: `read(index, batch)` returns features [rows, features] and targets of one.
            group: The processes; None: this one.
        """

    @abstractmethod
    def fit_(self, found: Any, mean: Tensor, prior: LayerPrior, likelihood: Likelihood, *, is_open: bool) -> Tensor:
        """Take over the posterior of these data, and choose a learned noise; returns the means.

        Args:
            found: What `gathered` found.
            mean: The weights as they are.
            prior: Prior of the weights.
            likelihood: Likelihood of the targets.
            is_open: Whether to choose a factor of the prior's precisions, too.
        """

    @abstractmethod
    def add_(self, found: Any, mean: Tensor, prior: LayerPrior, likelihood: Likelihood) -> Tensor:
        """Add these data to those before, if any; arguments and result are those of `fit_`, and nothing is chosen."""

    @abstractmethod
    def refresh_(self, prior: LayerPrior, likelihood: Likelihood) -> None:
        """Make the covariance from the natural parameters, under this prior and likelihood."""

    @abstractmethod
    def log_evidence(self, prior: LayerPrior, likelihood: Likelihood) -> float:
        """Log marginal likelihood of the data in nats, or a lower bound of it, under this prior and likelihood."""


class ConjugatePosterior(LayerPosterior):
    """The exact posterior under Gaussian noise, for any number of outputs.

    Args:
        features: Inputs of the layer, with that of the bias.
        outputs: Outputs of the layer.
        device: Where the network is.
    """

    nonnegative = ("rows", "alpha", "squares")
    cross: Tensor
    squares: Tensor

    def __init__(self, features: int, outputs: int, device: torch.device) -> None:
        super().__init__(features, outputs, device)
        self._add_buffer("cross", features, outputs)
        self._add_buffer("squares", outputs)

    def gathered(self, batches: Iterable[Any], read: Read, group: ProcessGroup | None) -> LinearData:
        """Sums over all examples; arguments as in `LayerPosterior.gathered`."""
        total: LinearData | None = None

        def state() -> dict[str, Any]:
            return dict(vars(total))

        def resume(state: dict[str, Any]) -> None:
            nonlocal total
            total = LinearData(**{name: tensor.to(self.gram.device) for name, tensor in state.items()})

        for index, batch in rest_of(batches, state, resume):
            features, targets = read(index, batch)
            own = LinearData.of(features, targets.reshape(len(features), -1).to(features.dtype))
            total = own if total is None else total + own
        if total is None:
            raise ValueError("The loader has no batches.")
        if group is None:
            return total
        tensors = [total.gram, total.cross, total.squares, total.rows]
        group.average_(tensors)
        return LinearData(*(tensor * group.data_groups for tensor in tensors))

    def fit_(self, found: Any, mean: Tensor, prior: LayerPrior, likelihood: Likelihood, *, is_open: bool) -> Tensor:
        """Regression on the data alone; noise and prior by the evidence where they are open."""
        assert isinstance(likelihood, GaussianNoise)
        problem, variance, one = Regression(found, prior), self._noise_variance(likelihood), torch.ones_like(self.alpha)
        noise = None if not likelihood.learn else "each" if likelihood.noise_rho.dim() else "one"
        variance, self.alpha = problem.maximum(variance, one, noise=noise, prior=is_open, least=MIN_STD**2)
        if noise is not None:
            likelihood.set_variance_(variance if noise == "each" else variance[0])
        return self._take(found, problem, likelihood)

    def add_(self, found: Any, mean: Tensor, prior: LayerPrior, likelihood: Likelihood) -> Tensor:
        """Regression on all data, by the sums over them."""
        data = self._data() + found
        return self._take(data, Regression(data, prior), likelihood)

    def _take(self, data: LinearData, problem: Regression, likelihood: Likelihood) -> Tensor:
        self.gram, self.cross, self.squares, self.rows = data.gram, data.cross, data.squares, data.rows
        return problem.mean(self._noise_variance(likelihood), self.alpha)

    def refresh_(self, prior: LayerPrior, likelihood: Likelihood) -> None:
        """An eigendecomposition serves the noises of all outputs."""
        problem = Regression(self._data(), prior)
        self.basis = problem.basis
        self.variances = problem.variances(self._noise_variance(likelihood), self.alpha)

    def log_evidence(self, prior: LayerPrior, likelihood: Likelihood) -> float:
        """Exact, summed over outputs."""
        problem = Regression(self._data(), prior)
        return float(problem.log_evidence(self._noise_variance(likelihood), self.alpha).sum())

    def _data(self) -> LinearData:
        return LinearData(self.gram, self.cross, self.squares, self.rows)

    def _noise_variance(self, likelihood: Likelihood) -> Tensor:
        """Variance of each output's noise, [outputs]."""
        assert isinstance(likelihood, GaussianNoise)
        std = F.softplus(likelihood.noise_rho.detach().to(self.dtype))
        return std.square().expand(self.outputs)


class ClassPosterior(LayerPosterior):
    """The Gaussian that maximises the tilted bound; all outputs share a covariance.

    Args:
        features: Inputs of the layer, with that of the bias.
        outputs: Outputs of the layer.
        device: Where the network is.
    """

    bound: Tensor

    def __init__(self, features: int, outputs: int, device: torch.device) -> None:
        super().__init__(features, outputs, device)
        self._add_buffer("bound")

    def gathered(self, batches: Iterable[Any], read: Read, group: ProcessGroup | None) -> Examples:
        """All features and labels; arguments as in `LayerPosterior.gathered`."""
        own: list[Examples] = []

        def joined() -> Examples:
            features, labels = zip(*own, strict=True)
            return torch.cat(features), torch.cat(labels)

        def resume(state: dict[str, Any]) -> None:
            features, labels = (tensor.to(self.gram.device) for tensor in state["examples"])
            own.append((features, labels))

        for index, batch in rest_of(batches, lambda: {"examples": joined()}, resume):
            own.append(read(index, batch))
        if not own:
            raise ValueError("The loader has no batches.")
        features, labels = joined()
        if group is None or group.world == 1:
            return features, labels
        # One process of each data group: the others have seen the same rows.
        sources = range(0, group.world, group.mc_groups)
        found = [group.share((features.cpu(), labels.cpu()) if group.rank == s else None, s) for s in sources]
        features, labels = (torch.cat(each).to(self.gram.device) for each in zip(*found, strict=True))
        return features, labels

    def fit_(self, found: Any, mean: Tensor, prior: LayerPrior, likelihood: Likelihood, *, is_open: bool) -> Tensor:
        """Maximise the bound for these data alone."""
        features, labels = found
        best = ClassSolver(features, labels, prior).solve(mean, choose_alpha=is_open)
        self.gram = best.curvature
        self.alpha = torch.full_like(self.alpha, best.alpha)
        self.bound = torch.full_like(self.bound, best.bound)
        self.rows = torch.full_like(self.rows, len(features))
        return best.mean

    def add_(self, found: Any, mean: Tensor, prior: LayerPrior, likelihood: Likelihood) -> Tensor:
        """Maximise it with the posterior so far as the prior."""
        features, labels = found
        now = LayerPrior(mean if self.rows > 0 else prior.mean, self.alpha * prior.precision)
        best = ClassSolver(features, labels, now, self.gram).solve(mean, choose_alpha=False)
        self.gram = self.gram + best.curvature
        self.bound = self.bound + best.bound
        self.rows = self.rows + len(features)
        return best.mean

    def refresh_(self, prior: LayerPrior, likelihood: Likelihood) -> None:
        """The inverse of the precision's Cholesky factor is a basis in which all variances are 1."""
        lower = torch.linalg.cholesky(self.gram + (self.alpha * prior.precision.mean(1)).diag())
        identity = torch.eye(len(lower), **self._options)
        self.basis = torch.linalg.solve_triangular(lower.T, identity, upper=True).unsqueeze(0)
        self.variances = torch.ones_like(self.basis[..., 0])

    def log_evidence(self, prior: LayerPrior, likelihood: Likelihood) -> float:
        """The bound; with data that were added, only about one."""
        return float(self.bound)
