"""Mean weights, one draw, all draws, baseline and chance: against plain loops and `credo.predict`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import credo
from credo.core.posterior import Posterior
from credo.doctor.measure.predictive import make_predictive, predict_draws, predict_mean
from credo.doctor.measure.scores import gap, learned_fraction, scores
from credo.doctor.subset import Subset, take_subset

Trained = Callable[..., Posterior]


def test_draws_against_a_loop(trained: Trained, loaders: Any) -> None:
    posterior = trained("bbb", "conv", fresh=True)
    test = take_subset(loaders("conv")[1], most=300)
    found = predict_draws(posterior, test, draws=5, seed=4)
    with torch.no_grad(), posterior.seeded(4):
        posterior.eval()
        probs = []
        for draw in posterior.iter_draws(5):
            with posterior.sampled(draw) as net:
                probs.append(net(test.x).softmax(-1))
    stacked = torch.stack(probs)
    accuracies = (stacked.argmax(-1) == test.y).double().mean(1)
    torch.testing.assert_close(found.metric_of_draws, accuracies)
    chosen = stacked[:, torch.arange(len(test.y)), test.y].double()
    torch.testing.assert_close(found.nll_of_draws, -chosen.log().mean(1), rtol=1e-4, atol=1e-6)
    assert found.nll == pytest.approx(float(-chosen.mean(0).log().mean()), rel=1e-4)
    assert found.metric == pytest.approx(float((stacked.mean(0).argmax(-1) == test.y).double().mean()))


@pytest.mark.parametrize(("method", "kind"), [("bbb", "mlp"), ("ensemble", "mlp"), ("bbb", "curve"), ("map", "curve")])
def test_all_draws_agree_with_predict(trained: Trained, loaders: Any, method: str, kind: str) -> None:
    """The same draws for all inputs, in the same order; batches differ, so only rounding does."""
    posterior = trained(method, kind)
    test = take_subset(loaders(kind)[1], most=250)
    found = predict_draws(posterior, test, draws=6, seed=2)
    prediction = credo.predict(posterior, [(test.x, test.y)], draws=6, seed=2, shared_draws=True)
    assert found.nll == pytest.approx(float(-prediction.log_likelihood.double().mean()), rel=1e-4)
    if kind == "mlp":
        assert found.metric == pytest.approx(float((prediction.labels == test.y).double().mean()))
    else:
        assert found.metric == pytest.approx(credo.evaluate.rmse(prediction.mean, test.y), rel=1e-4)
        torch.testing.assert_close(found.total.float(), prediction.total, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


def test_the_mean_network_has_no_noise(trained: Trained, loaders: Any) -> None:
    test = take_subset(loaders("mlp")[1], most=200)
    for method in ("bbb", "dropout", "map"):
        posterior = trained(method, "mlp", fresh=True)
        found = predict_mean(posterior, test)
        with torch.no_grad():
            nll = torch.nn.functional.cross_entropy(posterior.model.eval()(test.x), test.y)
        assert found.draws == 1
        assert found.nll == pytest.approx(float(nll), rel=1e-5)


def test_the_whole_table(trained: Trained, loaders: Any) -> None:
    posterior, baseline = trained("bbb", "mlp"), trained("map", "mlp")
    train, test = (take_subset(loader, most=300) for loader in loaders("mlp"))
    draws, on_train = predict_draws(posterior, test, draws=8), predict_draws(posterior, train, draws=4)
    mean, plain = predict_mean(posterior, test), predict_draws(baseline, test, draws=8)
    found = scores(draws, mean=mean, baseline=plain, train=on_train, train_targets=train.y)
    assert (found.metric, found.ensemble.nll, found.ensemble.metric) == ("accuracy", draws.nll, draws.metric)
    assert found.draw.nll == pytest.approx(float(draws.nll_of_draws.mean()))
    assert found.lowest <= found.draw.metric <= found.highest
    assert found.baseline is not None
    assert found.baseline.nll == plain.nll
    assert plain.draws == 1
    assert found.draw.nll >= found.ensemble.nll  # Jensen
    counts = train.y.bincount().double() / len(train.y)
    assert found.chance.metric == pytest.approx(float(counts.max()))
    assert found.chance.nll == pytest.approx(float(-(counts * counts.log()).sum()))
    assert found.learned == pytest.approx((on_train.metric - float(counts.max())) / (1 - float(counts.max())))
    parts = [found.mean_over_baseline, found.ensemble_over_mean, found.ensemble_over_baseline]
    values = [part.nll.value for part in parts if part is not None]
    assert values[0] + values[1] == pytest.approx(values[2])  # the gap's two parts add up


def test_gaps_have_the_sign_of_worse() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    good, bad = (torch.tensor([[p, 1 - p], [1 - p, p]] * 2).log().unsqueeze(0) for p in (0.9, 0.4))
    likelihoods = [credo.Categorical()]
    found = gap(make_predictive(likelihoods, bad, labels), make_predictive(likelihoods, good, labels))
    assert found.nll.value == pytest.approx(math.log(0.9 / 0.4), rel=1e-5)
    assert found.error.value == 1.0
    y = torch.tensor([[0.0], [0.0]])
    noise = [credo.GaussianNoise(1.0)]
    values = gap(make_predictive(noise, torch.full((1, 2, 1), 3.0), y), make_predictive(noise, torch.ones(1, 2, 1), y))
    assert (values.error.value, values.nll.value) == (pytest.approx(8.0), pytest.approx(4.0))


def test_chance_of_a_regression() -> None:
    y = torch.tensor([[1.0, 10.0], [3.0, 10.5], [5.0, 9.5]])
    on_train = make_predictive([credo.GaussianNoise(1.0)], y.unsqueeze(0), y)
    found = scores(on_train, mean=None, baseline=None, train=on_train, train_targets=y)
    variances = y.double().var(0, correction=0)
    assert found.chance.metric == pytest.approx(float(variances.mean()) ** 0.5)
    normal = torch.distributions.Normal(y.double().mean(0), variances.sqrt())
    assert found.chance.nll == pytest.approx(float(-normal.log_prob(y.double()).sum(1).mean()))
    assert found.learned == 1.0
    assert (found.mean, found.ensemble_over_mean, found.mean_over_baseline) == (None, None, None)


@pytest.mark.parametrize(
    ("metric", "value", "chance", "wanted"),
    [("accuracy", 0.55, 0.1, 0.5), ("accuracy", 0.1, 0.1, 0.0), ("rmse", 0.5, 1.0, 0.75), ("rmse", 2.0, 1.0, -3.0)],
)
def test_learned_share(metric: str, value: float, chance: float, wanted: float) -> None:
    assert learned_fraction(metric, value, chance) == pytest.approx(wanted)


def test_learned_share_of_trivial_targets() -> None:
    assert learned_fraction("accuracy", 1.0, 1.0) == 1.0
    assert learned_fraction("rmse", 0.0, 0.0) == 1.0


def test_members_with_noise_of_their_own() -> None:
    """Draw i belongs to member i: each with its own learned noise."""
    y = torch.zeros(3, 1)
    found = make_predictive([credo.GaussianNoise(1.0), credo.GaussianNoise(2.0)], torch.zeros(4, 3, 1), y)
    wanted = [float(torch.distributions.Normal(0.0, std).log_prob(torch.tensor(0.0))) for std in (1.0, 2.0, 1.0, 2.0)]
    assert found.log_likelihood[:, 0].tolist() == pytest.approx(wanted, rel=1e-5)


def test_bernoulli_and_plain_targets() -> None:
    logits = torch.tensor([[2.0], [-1.0]]).unsqueeze(0)
    found = make_predictive([credo.Bernoulli()], logits, torch.tensor([[1.0], [0.0]]))
    assert found.metric == 1.0
    assert found.nll == pytest.approx(float(torch.nn.functional.softplus(torch.tensor([-2.0, -1.0])).mean()), rel=1e-5)
    flat = make_predictive([credo.GaussianNoise(1.0)], torch.zeros(2, 5), torch.ones(5))
    assert flat.metric == 1.0
    with pytest.raises(ValueError, match="shape"):
        make_predictive([credo.GaussianNoise(1.0)], torch.zeros(2, 5, 1), torch.ones(5))


def test_a_sample_larger_than_a_pass(trained: Trained, loaders: Any) -> None:
    """Several passes, the same networks in each: as one pass over everything."""
    posterior = trained("bbb", "conv")
    whole = take_subset(loaders("conv")[1], most=300)
    rows = Subset(whole.x[:20], whole.y[:20], 20, 1, 20)
    both, few = (predict_draws(posterior, sample, draws=12) for sample in (whole, rows))
    torch.testing.assert_close(both.log_likelihood[:, :20], few.log_likelihood, rtol=1e-4, atol=1e-5)
