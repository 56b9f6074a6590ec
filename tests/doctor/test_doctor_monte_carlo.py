"""Monte-Carlo errors against the brute force: many sets of draws."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from credo.core.likelihood import Categorical, GaussianNoise
from credo.doctor.measure.monte_carlo import monte_carlo, nll_errors, within_variance
from credo.doctor.measure.predictive import Predictive, make_predictive
from credo.doctor.subset import take_subset

SETS, DRAWS, N = 400, 16, 200


def class_sets() -> tuple[Tensor, Tensor]:
    """Logits [sets, draws, n, 3] that vary by draw (the same way for all examples) and by example; labels."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(N, 3, generator=generator)
    shared = 0.5 * torch.randn(SETS, DRAWS, 1, 3, generator=generator)
    each = 0.7 * torch.randn(SETS, DRAWS, N, 3, generator=generator)
    labels = torch.multinomial(base.softmax(-1), 1, generator=generator)[:, 0]
    return base + shared + each, labels


def value_sets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(N, 1, generator=generator)
    shared = 0.3 * torch.randn(SETS, DRAWS, 1, 1, generator=generator)
    each = 0.4 * torch.randn(SETS, DRAWS, N, 1, generator=generator)
    return 0.5 * y + shared + each, y


@pytest.fixture(scope="module")
def predictives() -> dict[str, list[Predictive]]:
    logits, labels = class_sets()
    means, y = value_sets()
    return {
        "classes": [make_predictive([Categorical()], one, labels) for one in logits],
        "values": [make_predictive([GaussianNoise(0.7)], one, y) for one in means],
    }


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_errors_of_the_nll_against_many_sets_of_draws(predictives: Any, kind: str) -> None:
    """The spread over 400 sets is known to 3.5 %; to first order in 1/16 the estimate is off by some per cent more."""
    sets = predictives[kind]
    estimates = [nll_errors(one.log_likelihood, 1) for one in sets]
    bias, error = (sum(pair[i] for pair in estimates) / SETS for i in (0, 1))
    nlls = torch.tensor([one.nll for one in sets], dtype=torch.float64)
    assert error == pytest.approx(float(nlls.std()), rel=0.15)
    # Endlessly many draws: all sets together.
    everything = torch.cat([one.log_likelihood for one in sets])
    limit = float(-(everything.logsumexp(0) - math.log(len(everything))).mean())
    assert bias == pytest.approx(float(nlls.mean()) - limit, rel=0.2)


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_errors_of_the_metric_against_many_sets_of_draws(predictives: Any, kind: str) -> None:
    sets = predictives[kind]
    found = [monte_carlo(one, random=True) for one in sets[:40]]
    metrics = torch.tensor([one.metric for one in sets], dtype=torch.float64)
    mean = sum(one.metric_error for one in found if one is not None) / len(found)
    assert mean == pytest.approx(float(metrics.std()), rel=0.15)


def test_errors_of_probabilities(predictives: Any) -> None:
    sets = predictives["classes"]
    pooled = torch.stack([one.pooled for one in sets])
    wanted = float(pooled.std(0).amax(-1).mean())
    found = [monte_carlo(one, random=True) for one in sets[:40]]
    mean = sum(one.probability_error for one in found if one is not None) / len(found)
    assert mean == pytest.approx(wanted, rel=0.15)


def test_errors_of_values_are_fractions_of_the_predictive_std(predictives: Any) -> None:
    sets = predictives["values"]
    means = torch.stack([one.mean.mean(0) for one in sets])
    totals = torch.stack([one.total for one in sets]).mean(0)
    found = [monte_carlo(one, random=True) for one in sets[:40]]
    mean = sum(one.probability_error for one in found if one is not None) / len(found)
    assert mean == pytest.approx(float((means.std(0) / totals).mean()), rel=0.15)


def test_members_in_turn_are_no_error() -> None:
    """Draws 0, 2, … of one member and 1, 3, … of another: what the members differ by is not luck of the draws."""
    values = torch.tensor([0.0, 10.0, 2.0, 12.0, 4.0, 14.0, 0.0, 10.0])
    by_hand = (values[0::2].var() + values[1::2].var()) / 2
    torch.testing.assert_close(within_variance(values, 2), by_hand)
    assert float(within_variance(values, 1)) > 5 * float(by_hand)
    same = torch.tensor([0.3, 0.9] * 4).log().unsqueeze(1).double()
    assert nll_errors(same, 2) == (0.0, 0.0)
    assert nll_errors(same, 1)[1] > 0


def test_nothing_random_has_no_error(predictives: Any) -> None:
    one = predictives["classes"][0]
    assert monte_carlo(one, random=False) is None
    logits, labels = class_sets()
    assert monte_carlo(make_predictive([Categorical()] * 2, logits[0][:3], labels), random=True) is None


def test_wanted_draws_keep_what_they_promise(trained: Callable[..., Any], loaders: Any) -> None:
    """With as many draws as suggested, no more are wanted (up to the noise of the estimate: one doubling)."""
    from credo.doctor.measure.predictive import predict_draws

    posterior = trained("bbb", "mlp", init=0.1, temperature=1.0)
    test = take_subset(loaders("mlp")[1], most=300)
    first = monte_carlo(predict_draws(posterior, test, draws=8), random=True)
    assert first is not None
    assert first.wanted_draws > 8
    then = monte_carlo(predict_draws(posterior, test, draws=first.wanted_draws), random=True)
    assert then is not None
    assert then.wanted_draws <= 2 * first.wanted_draws
    assert then.nll_error < first.nll_error
    assert first.wanted_draws & (first.wanted_draws - 1) == 0


def test_draws_wanted_by_hand() -> None:
    """p = 0.4 and 0.6 in turn, S = 8: the standard error is √(8/7)·0.1/√8 ≈ 0.038, 0.02 needs 8·(0.038/0.02)² = 29."""
    logits = torch.tensor([[0.4, 0.6], [0.6, 0.4]] * 4).log().unsqueeze(1).expand(8, 50, 2)
    found = monte_carlo(make_predictive([Categorical()], logits, torch.zeros(50, dtype=torch.long)), random=True)
    assert found is not None
    assert found.probability_error == pytest.approx(0.1 / math.sqrt(7), rel=1e-5)
    tolerated = 0.05 * math.log(2)
    assert found.nll_error == pytest.approx(0.2 / math.sqrt(7), rel=1e-5)
    assert found.nll_error > tolerated
    exact = 8 * max((0.1 / math.sqrt(7) / 0.02) ** 2, (found.nll_error / tolerated) ** 2)
    assert found.wanted_draws == 2 ** math.ceil(math.log2(exact))
