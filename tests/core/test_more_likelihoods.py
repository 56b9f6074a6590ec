"""Counts, labels, ordered classes, heavy tails, mixtures, times and quantiles against SciPy and brute force."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch.nn import functional as F

import credo
from credo.core.example_counts import EVERY
from credo.core.likelihood import LIKELIHOODS, Likelihood, make_likelihood
from credo.core.likelihood.distribution import DistributionLikelihood
from credo.likelihoods import (
    Categorical,
    CensoredTimes,
    MixtureDensity,
    MultiLabel,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Quantiles,
    StudentT,
)
from credo.methods.laplace.output_curvature import OutputCurvature, counted_targets


def outputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


COUNTS = torch.tensor([[0.0, 3.0], [1.0, 0.0], [7.0, 2.0]], dtype=torch.float64)


def test_poisson_is_scipys() -> None:
    o = outputs(3, 2)
    expected = -stats.poisson.logpmf(COUNTS.numpy(), o.exp().numpy()).sum(1)
    torch.testing.assert_close(Poisson().nll_each(o, COUNTS), torch.from_numpy(expected))
    torch.testing.assert_close(Poisson().nll(o, COUNTS.long()), torch.tensor(expected.mean()))


@pytest.mark.parametrize("dispersion", [0.01, 0.5, 3.0])
def test_negative_binomial_is_scipys_with_variance_mu_plus_alpha_mu_squared(dispersion: float) -> None:
    o, likelihood = outputs(3, 2), NegativeBinomial(dispersion)
    mean, r = o.exp().numpy(), 1 / dispersion
    expected = -stats.nbinom.logpmf(COUNTS.numpy(), r, r / (r + mean)).sum(1)
    torch.testing.assert_close(likelihood.nll_each(o, COUNTS), torch.from_numpy(expected), atol=1e-6, rtol=1e-6)
    made = likelihood.distribution(o)
    torch.testing.assert_close(made.mean, o.exp(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(made.variance, o.exp() + dispersion * o.exp().square(), atol=1e-5, rtol=1e-6)


def test_student_is_scipys() -> None:
    o, y = outputs(5, 2), 3 * outputs(5, 2).flip(0)
    expected = -stats.t.logpdf(y.numpy(), 5.0, o.numpy(), 0.7).sum(1)
    torch.testing.assert_close(StudentT(5, 0.7).nll_each(o, y), torch.from_numpy(expected), atol=1e-6, rtol=1e-6)


def test_mixture_density_is_the_sum_of_its_gaussians() -> None:
    o, y = outputs(4, 12), outputs(4, 2)
    found = MixtureDensity(2).nll_each(o, y)
    parts = o.view(4, 2, 3, 2)
    weight, mean, std = parts[:, :, 0].softmax(-1), parts[:, :, 1], F.softplus(parts[:, :, 2]) + 1e-4
    density = (weight.numpy() * stats.norm.pdf(y.unsqueeze(-1).numpy(), mean.numpy(), std.numpy())).sum(-1)
    torch.testing.assert_close(found, torch.from_numpy(-np.log(density).sum(1)))


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_censored_times_are_the_density_or_the_survival(family: str) -> None:
    o, likelihood = outputs(4, 1), CensoredTimes(family)
    with torch.no_grad():
        likelihood.log_sigma.fill_(math.log(0.6))
    times, seen = np.array([0.3, 1.0, 2.5, 4.0]), np.array([1.0, 0.0, 1.0, 0.0])
    scale = np.exp(o[:, 0].numpy())
    law = stats.weibull_min(1 / 0.6, scale=scale) if family == "weibull" else stats.lognorm(0.6, scale=scale)
    expected = -np.where(seen > 0, law.logpdf(times), law.logsf(times))
    y = torch.from_numpy(np.stack([times, seen], 1))
    torch.testing.assert_close(likelihood.nll_each(o, y), torch.from_numpy(expected), atol=1e-6, rtol=1e-6)


def test_ordinal_probabilities_are_differences_of_sigmoids() -> None:
    likelihood, score = Ordinal(4).double(), outputs(5)
    likelihood.start_(torch.tensor([0, 0, 1, 2, 3, 3, 3]))
    cuts = likelihood.cut_points().detach()
    assert bool((cuts.diff() > 0).all())
    below = torch.cat([torch.zeros(5, 1), (cuts - score.unsqueeze(1)).sigmoid(), torch.ones(5, 1)], 1).double()
    torch.testing.assert_close(likelihood.log_probs(score).exp(), below.diff(dim=1))
    far = likelihood.log_probs(torch.tensor([-60.0, 60.0], dtype=torch.float64))
    assert bool(far.isfinite().all())
    torch.testing.assert_close(far.exp().sum(1), torch.ones(2, dtype=torch.float64))


def test_ordinal_starts_at_the_frequencies_of_the_classes() -> None:
    likelihood = Ordinal(3).double()
    likelihood.start_(torch.tensor([0] * 60 + [1] * 30 + [2] * 10))
    found = likelihood.log_probs(torch.zeros(1, dtype=torch.float64)).exp()[0]
    expected = (torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64) + 0.1 / 3) / 1.1
    torch.testing.assert_close(found, expected)


def test_multi_label_is_the_sum_of_binary_cross_entropies() -> None:
    o, y = outputs(4, 3), torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]])
    expected = F.binary_cross_entropy_with_logits(o, y.double(), reduction="none").sum(1)
    torch.testing.assert_close(MultiLabel().nll_each(o, y), expected)
    torch.testing.assert_close(MultiLabel().nll(o, y), expected.mean())
    weighted = F.binary_cross_entropy_with_logits(
        o, y.double(), pos_weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), reduction="none"
    )
    torch.testing.assert_close(MultiLabel([1, 2, 5]).nll_each(o, y), weighted.sum(1))


def test_labels_that_are_not_known_have_no_loss_and_no_gradient() -> None:
    o, y = outputs(4, 3).requires_grad_(), torch.tensor([[1, 0, -100], [-100, 1, 1], [-100] * 3, [0, 0, 1]])
    likelihood = MultiLabel()
    known = y >= 0
    terms = F.binary_cross_entropy_with_logits(o, y.clamp_min(0).to(o), reduction="none")
    torch.testing.assert_close(likelihood.nll(o, y), terms[known].sum() / 3)
    assert likelihood.counted(y).of(4) == 3
    (gradient,) = torch.autograd.grad(likelihood.nll(o, y), o)
    assert gradient[~known].abs().max() == 0
    found = counted_targets(likelihood, y)
    curvature = OutputCurvature(likelihood, o.detach(), found).total()
    p = o.detach().sigmoid()
    torch.testing.assert_close(curvature, torch.diag((p * (1 - p) * known).sum(0)))
    with pytest.raises(ValueError, match=r"-100 where a label is not known; got -1\. In place of NaN"):
        likelihood.nll(o, torch.where(known, y, -1))


def test_quantiles_never_cross_and_their_loss_is_least_at_the_true_quantiles() -> None:
    likelihood = Quantiles((0.1, 0.5, 0.9)).double()
    assert bool((likelihood.quantiles(10 * outputs(50, 6)).diff(dim=-1) >= 0).all())
    y = torch.linspace(0, 1, 2001, dtype=torch.float64).unsqueeze(1)

    def loss(*quantiles: float) -> float:
        found = torch.tensor(quantiles, dtype=torch.float64).expand(len(y), 1, 3)
        return float(likelihood.pinball(found, y).mean())

    best = loss(0.1, 0.5, 0.9)
    moved = [loss(0.1 + d, 0.5, 0.9) for d in (-0.02, 0.02)] + [loss(0.1, 0.5, 0.9 + d) for d in (-0.02, 0.02)]
    assert best < min(moved)


LAWS: list[tuple[DistributionLikelihood, torch.Tensor]] = [
    (Poisson(), outputs(4, 2)),
    (NegativeBinomial(0.7), outputs(4, 2)),
    (StudentT(5, 0.8), outputs(4, 2)),
    (MixtureDensity(2), outputs(4, 12)),
    (CensoredTimes("weibull"), outputs(4, 1)),
    (CensoredTimes("lognormal"), outputs(4, 1)),
]


@pytest.mark.parametrize(("likelihood", "o"), LAWS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("level", [0.03, 0.5, 0.9, 0.999])
def test_quantile_inverts_the_distribution_function(likelihood, o: torch.Tensor, level: float) -> None:
    made = likelihood.distribution(o)
    found = likelihood.quantile(o, torch.full(made.mean.shape, level, dtype=torch.float64))
    if made.support.is_discrete:
        assert bool((made.cdf(found) >= level).all())
        assert bool((made.cdf(found - 1) < level).all())
    else:
        torch.testing.assert_close(made.cdf(found), torch.full_like(found, level), atol=1e-6, rtol=0)


def test_distribution_functions_are_scipys() -> None:
    o, k = outputs(3, 2), torch.tensor([[-1.0, 0.0], [2.0, 5.5], [1.0, 30.0]], dtype=torch.float64)
    found = Poisson().distribution(o).cdf(k)
    torch.testing.assert_close(found, torch.from_numpy(stats.poisson.cdf(k.numpy(), o.exp().numpy())))
    r, mean = 1 / 0.7, o.exp().numpy()
    found = NegativeBinomial(0.7).distribution(o).cdf(k)
    torch.testing.assert_close(
        found, torch.from_numpy(stats.nbinom.cdf(k.numpy(), r, r / (r + mean))), atol=1e-6, rtol=0
    )


def _fisher(likelihood: Likelihood, o: torch.Tensor) -> torch.Tensor:
    """E[∇ℓ ∇ℓᵀ] of one example with one target, by a fine sum over targets."""
    made = likelihood.distribution(o)
    if made.support.is_discrete:
        grid = torch.arange(400, dtype=torch.float64)
        weight = made.log_prob(grid.unsqueeze(1)).exp().flatten()
    else:
        levels = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
        grid = likelihood.quantile(o.expand(len(levels), -1), levels.unsqueeze(1)).flatten()
        weight = torch.full_like(grid, 1 / len(grid))
    leaf = o.expand(len(grid), -1).clone().requires_grad_()
    (g,) = torch.autograd.grad(likelihood.distribution(leaf).log_prob(grid.unsqueeze(1)).sum(), leaf)
    return (weight.unsqueeze(1) * g).T @ g


@pytest.mark.parametrize(
    ("likelihood", "size"),
    [
        (Poisson(), 1),
        (NegativeBinomial(0.7), 1),
        (StudentT(5, 0.8), 1),
        (MixtureDensity(2), 6),
        (CensoredTimes("weibull"), 1),
        (CensoredTimes("lognormal"), 1),
    ],
    ids=lambda v: type(v).__name__,
)
def test_curvature_factors_are_the_fisher_matrix(likelihood, size: int) -> None:
    o = outputs(1, size)
    vectors = likelihood.curvature_factors(o)[:, 0]
    tolerance = 0.05 if isinstance(likelihood, MixtureDensity) else 0.01  # by 32 points, and by the fine sum
    expected = _fisher(likelihood, o)
    assert float((vectors.T @ vectors - expected).norm() / expected.norm()) < tolerance
    torch.testing.assert_close(likelihood.curvature_diagonal(o)[0], (vectors.T @ vectors).diag())


def test_curvature_of_ordered_classes_is_the_exact_sum_over_classes() -> None:
    likelihood, o = Ordinal(4).double(), outputs(3, 1)
    found = likelihood.curvature_factors(o).square().sum(0)
    leaf = o.clone().requires_grad_()
    log_probs = likelihood.log_probs(leaf)
    expected = torch.zeros(3, 1, dtype=torch.float64)
    for k in range(4):
        (g,) = torch.autograd.grad(log_probs[:, k].sum(), leaf, retain_graph=True)
        expected += log_probs[:, k : k + 1].detach().exp() * g.square()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 5.0]])
def test_curvature_of_labels_is_the_expected_square_of_the_gradient(weights: list[float] | None) -> None:
    likelihood, o = MultiLabel(weights), outputs(1, 3)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for bits in range(8):
        y = torch.tensor([[bits >> i & 1 for i in range(3)]], dtype=torch.float64)
        leaf = o.clone().requires_grad_()
        (g,) = torch.autograd.grad(likelihood.nll(leaf, y), leaf)
        p = torch.where(y > 0, o.sigmoid(), 1 - o.sigmoid()).prod()
        centred = g[0] if weights is None else g[0] * torch.eye(3, dtype=torch.float64)  # labels are independent
        expected += p * (torch.outer(centred, centred) if weights is None else centred @ centred)
    vectors = likelihood.curvature_factors(o)[:, 0]
    if weights is None:
        torch.testing.assert_close(vectors.T @ vectors, expected)
    torch.testing.assert_close((vectors.T @ vectors).diag(), expected.diag())


def test_curvature_of_quantiles_is_that_of_asymmetric_laplace_distributions() -> None:
    likelihood, o = Quantiles((0.2, 0.7)).double(), outputs(1, 4)
    vectors = likelihood.curvature_factors(o)[:, 0]
    jacobian = torch.autograd.functional.jacobian(lambda one: likelihood.quantiles(one).flatten(), o)[:, 0]
    level = torch.tensor([0.2, 0.7, 0.2, 0.7], dtype=torch.float64)
    expected = jacobian.T @ torch.diag(level * (1 - level)) @ jacobian
    torch.testing.assert_close(vectors.T @ vectors, expected)


def test_targets_that_are_not_possible_are_named() -> None:
    with pytest.raises(ValueError, match=r"Poisson: the target -1 is not possible; targets are whole numbers from 0"):
        Poisson().nll(outputs(2, 1), torch.tensor([[1.0], [-1.0]]))
    with pytest.raises(ValueError, match=r"the target 0.5 is not possible"):
        NegativeBinomial().nll(outputs(1, 1), torch.tensor([[0.5]]))
    with pytest.raises(ValueError, match=r"targets of shape \[2\] for outputs that describe \[2, 1\]"):
        Poisson().nll(outputs(2, 1), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="the target nan is not possible"):
        StudentT().nll(outputs(1, 1), torch.tensor([[math.nan]]))
    with pytest.raises(ValueError, match="Times must be positive"):
        CensoredTimes().nll(outputs(1, 1), torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="1 where the event was observed"):
        CensoredTimes().nll(outputs(1, 1), torch.tensor([[1.0, 0.5]]))
    with pytest.raises(ValueError, match="Targets of MultiLabel are 0 or 1"):
        MultiLabel().nll(outputs(1, 2), torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="Labels run from 0 to 3, but Ordinal has 3 classes"):
        Ordinal(3).nll(outputs(2, 1), torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ordinal(1), "classes=1"),
        (lambda: NegativeBinomial(0), "dispersion=0"),
        (lambda: StudentT(2), "df=2"),
        (lambda: StudentT(scale=-1), "scale=-1"),
        (lambda: MixtureDensity(0), "components=0"),
        (lambda: Quantiles((0.9, 0.1)), "levels="),
        (lambda: Quantiles(()), "levels="),
        (lambda: CensoredTimes("gamma"), "Unknown family 'gamma'"),
        (lambda: MultiLabel([0.0]), "positive_weights="),
        (lambda: Categorical(class_dim=1), "class_dim=1 must be negative"),
        (lambda: Categorical(class_weights=[0.0, 0.0]), "class_weights="),
        (lambda: Categorical(ignore_index=None), "ignore_index=None"),
    ],
)
def test_wrong_arguments_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_description_rebuilds_the_likelihood(kind: str) -> None:
    made = make_likelihood({"kind": kind, **({"classes": 3} if kind == "ordinal" else {})})
    again = make_likelihood(json.loads(json.dumps(made.config())))
    assert type(again) is type(made)
    assert again.config() == made.config()
    assert again.state_dict().keys() == made.state_dict().keys()


def test_classes_in_another_dimension_are_torchs_cross_entropy() -> None:
    logits, y = outputs(2, 4, 3, 5), torch.arange(30).view(2, 3, 5) % 4
    y[0, 0, :3] = 255
    likelihood = Categorical(class_dim=-3, ignore_index=255)
    torch.testing.assert_close(likelihood.nll(logits, y), F.cross_entropy(logits, y, ignore_index=255))
    torch.testing.assert_close(likelihood.log_probs(logits), F.log_softmax(logits, 1).movedim(1, -1))
    with pytest.raises(ValueError, match=r"use Categorical\(class_dim=-3\)"):
        Categorical().nll(logits, y)


def test_class_weights_count_examples_as_if_they_were_repeated() -> None:
    logits, y = outputs(4, 3), torch.tensor([0, 1, 2, 1])
    likelihood = Categorical(class_weights=[1, 2, 3])
    repeated = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3])
    torch.testing.assert_close(likelihood.nll(logits, y), Categorical().nll(logits[repeated], y[repeated]))
    counted = likelihood.counted(y)
    assert counted.weights is not None
    assert counted.weights.tolist() == [1.0, 2.0, 3.0, 2.0]
    assert counted.of(4) == 8.0
    assert Categorical().counted(y) == EVERY


def test_student_bounds_the_pull_of_an_outlier() -> None:
    o = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    pulls = []
    for y in (1.0, 10.0, 1000.0):
        (g,) = torch.autograd.grad(StudentT(4, 1.0).nll(o, torch.tensor([[y]], dtype=torch.float64)), o)
        pulls.append(-float(g))
    assert pulls[0] > pulls[1] > pulls[2] > 0


def test_integrals_of_densities_are_one() -> None:
    o = outputs(1, 6)
    law = MixtureDensity(2).distribution(o)
    total, _ = integrate.quad(lambda y: float(law.log_prob(torch.tensor([[y]])).exp()), -30, 30, limit=500)
    assert total == pytest.approx(1, abs=1e-6)


def test_own_distribution_needs_one_method() -> None:
    class Gamma(DistributionLikelihood):
        kind = "gamma"

        def __init__(self, shape: float = 2.0) -> None:
            super().__init__()
            self.shape = shape

        def distribution(self, outputs: torch.Tensor) -> torch.distributions.Distribution:
            return torch.distributions.Gamma(torch.full_like(outputs, self.shape), outputs.exp())

    assert Gamma(3.0).config() == {"kind": "gamma", "shape": 3.0}
    y = torch.tensor([[0.5], [2.0]])
    prediction = credo.predict(credo.MAP(torch.nn.Linear(1, 1), data_size=2, likelihood=Gamma()), [(y, y)])
    assert prediction.mean.shape == (2, 1)
    low, high = prediction.interval(0.9)
    assert bool((low < prediction.mean).all())
    assert bool((prediction.mean < high).all())


@pytest.mark.parametrize(
    ("base", "needed"), [(DistributionLikelihood, "distribution"), (credo.likelihoods.ClassLikelihood, "log_probs")]
)
def test_what_a_likelihood_of_your_own_lacks_is_named(base: type[Likelihood], needed: str) -> None:
    with pytest.raises(TypeError, match=needed):
        type("Own", (base,), {})()
