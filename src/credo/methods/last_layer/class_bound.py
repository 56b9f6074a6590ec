"""The tilted bound of classification, and the Gaussian of a last layer that maximises it.

For independent logits fₖ ~ N(mₖ, vₖ) and any numbers aₖ (Knowles and Minka 2011),

    E[log Σ exp fₖ] ≤ ½ Σ aₖ²vₖ + log Σ exp(mₖ + (½ − aₖ)vₖ).

At a = 0 this is Jensen's bound, as in variational Bayesian last layers (Harrison et al. 2024). At the best a, where
aₖ = softmaxₖ(m + (½ − a)v), it is much tighter: for v = 1 its gap is between a hundredth and a quarter of Jensen's. Its
derivative by vₖ is then ½aₖ(1 − aₖ): the curvature vanishes where the network is certain, as that of the likelihood
itself does. So its Gaussian is not as narrow as Jensen's, nor as that of a constant curvature (Böhning 1992).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.methods.last_layer.conjugate import HIGHEST, LOWEST, LayerPrior

# Numbers of one chunk of rows: temporaries of this size are made some ten times.
_CHUNK = 2**21
# In nats: a bound is found if a round adds no more.
_SMALLEST_GAIN = 1e-2
_MOST_ROUNDS = 100
_LBFGS_STEPS = 10
_SMALLEST_STEP = 2.0**-7
_NEWTON_STEPS = 30
_LARGEST_NEWTON_STEP = 3.0


def best_tilt(mean: Tensor, variance: Tensor) -> Tensor:
    """The a for which the bound is lowest, to about 1e-6, [..., classes]; a bound whatever its error.

    Newton's method for log aₖ + vₖaₖ + c = mₖ + ½vₖ and Σ aₖ = 1, with a and c unknown.

    Args:
        mean: m, [..., classes].
        variance: v, of the same shape or broadcast to it.
    """
    target = mean + 0.5 * variance
    log_a = (mean / (1 + math.pi / 8 * variance).sqrt()).log_softmax(-1)
    a = log_a.exp()
    level = (a * (target - log_a - variance * a)).sum(-1, keepdim=True)
    for _ in range(_NEWTON_STEPS):
        error = log_a + variance * a + level - target
        derivative = 1 + variance * a
        weight = a / derivative
        change = (a.sum(-1, keepdim=True) - 1 - (weight * error).sum(-1, keepdim=True)) / weight.sum(-1, keepdim=True)
        step = (-(error + change) / derivative).clamp_(-_LARGEST_NEWTON_STEP, _LARGEST_NEWTON_STEP)
        log_a, level = log_a + step, level + change
        a = log_a.exp()
        if float((a * step).abs().max()) < 1e-7:
            break
    return a


def tilted_bound(mean: Tensor, variance: Tensor, a: Tensor) -> Tensor:
    """The upper bound of E[log Σ exp fₖ], [...].

    Args:
        mean: m, [..., classes].
        variance: v, of the same shape or broadcast to it.
        a: Any numbers, [..., classes].
    """
    return 0.5 * (a.square() * variance).sum(-1) + (mean + (0.5 - a) * variance).logsumexp(-1)


@dataclass
class _Rows:
    """Some examples, and a tilt of the bound for each.

    Attributes:
        features: φ, [rows, features].
        labels: [rows, 1].
        free: 1 for logits that are random, 0 for the fixed first one of two classes, [classes].
        a: The tilt, [rows, classes].
        shift: (½ − a)v, [rows, classes].
    """

    features: Tensor
    labels: Tensor
    free: Tensor
    a: Tensor
    shift: Tensor

    def logits(self, mean: Tensor) -> Tensor:
        """Mean logits [rows, classes] under the mean weights [features, outputs]."""
        return F.pad(self.features @ mean, (len(self.free) - mean.shape[1], 0))

    def variance(self, root: Tensor) -> Tensor:
        """Variances of the logits, [rows, classes], for the covariance rootᵀ·root of an output's weights."""
        return (self.features @ root.T).square().sum(-1, keepdim=True) * self.free

    def tilt_(self, mean: Tensor, root: Tensor) -> None:
        """Make the bound of every row tight."""
        logits, variance = self.logits(mean), self.variance(root)
        self.a = best_tilt(logits, variance)
        self.shift = (0.5 - self.a) * variance

    def log_likelihood(self, mean: Tensor, root: Tensor) -> float:
        """Lower bound of Σ E[log p(y)], with the tilt as it is."""
        logits = self.logits(mean)
        return float(
            (logits.gather(1, self.labels).squeeze(1) - tilted_bound(logits, self.variance(root), self.a)).sum()
        )

    def loss(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """−Σ (m_y − log Σ exp(m + shift)), and its gradient by the mean weights."""
        logits = self.logits(mean)
        shifted = logits + self.shift
        loss = (shifted.logsumexp(-1) - logits.gather(1, self.labels).squeeze(1)).sum()
        residual = shifted.softmax(-1).scatter_add_(1, self.labels, -torch.ones_like(shifted[:, :1]))
        return loss, self.features.T @ residual[:, len(self.free) - mean.shape[1] :]

    def curvature(self, mean: Tensor) -> Tensor:
        """Σ h·φφᵀ, −h the bound's derivative by φᵀSφ, twice and as a mean over outputs."""
        probs = (self.logits(mean) + self.shift).softmax(-1)
        by_class = ((self.a - probs).square() + probs * (1 - probs)) * self.free
        h = by_class.sum(-1, keepdim=True) / self.free.sum()
        return self.features.T @ (h * self.features)


@dataclass(frozen=True)
class ClassGaussian:
    """N(mean_k, P⁻¹) for the weights of each output k, P = curvature + earlier + α·diag(p̄), p̄ the prior's precisions.

    Attributes:
        mean: [features, outputs].
        curvature: Σ h·φφᵀ over the data, [features, features].
        alpha: α.
        root: rootᵀ·root = P⁻¹.
        bound: Lower bound of the log marginal likelihood of the data, in nats.
    """

    mean: Tensor
    curvature: Tensor
    alpha: float
    root: Tensor
    bound: float


class ClassSolver:
    """Maximises a lower bound of Σ E[log p(y)] − KL(q ‖ prior) over Gaussians q with one covariance for all outputs.

    Args:
        features: φ, [examples, features].
        labels: [examples], from 0.
        prior: Prior of the weights; with one output and two classes, of the second one's logit.
        earlier: Precision that earlier data add to the prior of every output's weights; None: nothing.
    """

    def __init__(self, features: Tensor, labels: Tensor, prior: LayerPrior, earlier: Tensor | None = None) -> None:
        outputs = prior.mean.shape[1]
        fixed = int(outputs == 1)
        free = F.pad(features.new_ones(outputs), (fixed, 0))
        size = max(1, _CHUNK // len(free))
        none = features.new_zeros(0)
        parts = zip(features.split(size), labels.view(-1, 1).split(size), strict=True)
        self.parts = [_Rows(phi, y, free, none, none) for phi, y in parts]
        self.prior, self.outputs = prior, outputs
        self.earlier = features.new_zeros(features.shape[1], features.shape[1]) if earlier is None else earlier
        self.mean_precision = prior.precision.mean(1)
        self.log_det = prior.precision.log().sum() if earlier is None else _log_det(prior, earlier)
        classes = len(free)
        self.first_curvature = features.T @ features * ((classes - 1) / classes**2)

    def solve(self, mean: Tensor, *, choose_alpha: bool) -> ClassGaussian:
        """The best Gaussian.

        Args:
            mean: To start from, [features, outputs].
            choose_alpha: Whether to choose the factor α of the prior's precisions, too, else 1; not with earlier data.
        """
        root = self._root(self.first_curvature, 1.0)
        found = ClassGaussian(mean, self.first_curvature, 1.0, root, -math.inf)
        for _ in range(_MOST_ROUNDS):
            before = found.bound
            for part in self.parts:
                part.tilt_(found.mean, found.root)
            found = self._with_best_mean(found)
            found = self._with_better_curvature(found)
            if choose_alpha:
                found = self._with_better_alpha(found)
            if found.bound - before < _SMALLEST_GAIN:
                break
        return found

    def _with_best_mean(self, now: ClassGaussian) -> ClassGaussian:
        """Some steps of L-BFGS in coordinates where q is white."""
        root = now.root
        whitened = torch.linalg.solve_triangular(root.T, now.mean, upper=True)
        optimizer = torch.optim.LBFGS([whitened], max_iter=_LBFGS_STEPS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            mean = root.T @ whitened
            pull = self._precision(mean - self.prior.mean, now.alpha)
            loss: Tensor = 0.5 * ((mean - self.prior.mean) * pull).sum()
            gradient = pull
            for part in self.parts:
                own, by_mean = part.loss(mean)
                loss, gradient = loss + own, gradient + by_mean
            whitened.grad = root @ gradient
            return loss

        optimizer.step(closure)
        return self._evaluated(root.T @ whitened, now.curvature, now.alpha)

    def _with_better_curvature(self, now: ClassGaussian) -> ClassGaussian:
        """A step of the natural gradient of the precision, shorter until the bound rises."""
        target = sum((part.curvature(now.mean) for part in self.parts), torch.zeros_like(now.curvature))
        step = 1.0
        while step > _SMALLEST_STEP:
            new = self._evaluated(now.mean, torch.lerp(now.curvature, target, step), now.alpha)
            if new.bound > now.bound:
                return new
            step /= 2
        return now

    def _with_better_alpha(self, now: ClassGaussian) -> ClassGaussian:
        """MacKay's fixed point, or where that lowers the bound the step of expectation maximisation, which cannot."""
        count = float(now.mean.numel())
        squares = float((self.prior.precision * (now.mean - self.prior.mean).square()).sum())
        trace = self.outputs * float((now.root.square() @ self.mean_precision).sum())
        for alpha in ((count - now.alpha * trace) / max(squares, 1e-300), count / (squares + trace)):
            new = self._evaluated(now.mean, now.curvature, min(max(alpha, LOWEST), HIGHEST))
            if new.bound > now.bound:
                return new
        return now

    def _evaluated(self, mean: Tensor, curvature: Tensor, alpha: float) -> ClassGaussian:
        root = self._root(curvature, alpha)
        fit = sum(part.log_likelihood(mean, root) for part in self.parts)
        return ClassGaussian(mean, curvature, alpha, root, fit - self._kl(mean, root, alpha))

    def _kl(self, mean: Tensor, root: Tensor, alpha: float) -> float:
        """KL(q ‖ prior) of all outputs, in nats."""
        offset = mean - self.prior.mean
        scatter = (offset * self._precision(offset, alpha)).sum()
        shared = self.earlier + alpha * self.mean_precision.diag()
        trace = ((root @ shared) * root).sum() - len(root)
        log_det = -2 * root.diagonal().log().sum()
        prior_log_det = self.log_det + mean.numel() * math.log(alpha)
        return 0.5 * float(scatter + self.outputs * (trace + log_det) - prior_log_det)

    def _precision(self, offset: Tensor, alpha: float) -> Tensor:
        """The prior's precision, with that of earlier data, times vectors [features, outputs]."""
        return alpha * self.prior.precision * offset + self.earlier @ offset

    def _root(self, curvature: Tensor, alpha: float) -> Tensor:
        precision = curvature + self.earlier + alpha * self.mean_precision.diag()
        lower = torch.linalg.cholesky(precision)
        root: Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
        return root


def _log_det(prior: LayerPrior, earlier: Tensor) -> Tensor:
    """Log determinants of the prior's precisions with those of earlier data, summed over outputs."""
    precisions = prior.precision.T
    precisions = precisions[:1] if prior.is_shared else precisions
    each: Tensor = torch.linalg.slogdet(earlier + precisions.diag_embed())[1]
    return each.mean() * prior.mean.shape[1]
