"""Predictions of counts, times, quantiles, several labels and pixels against the slow obvious way."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo import likelihoods as L
from credo.core.likelihood import Likelihood
from credo.predict.draw_loop import make_moments

DRAWS, ROWS = 7, 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(DRAWS, ROWS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_counts_follow_the_law_of_total_variance_and_the_mixture() -> None:
    outputs, y = drawn(2), torch.tensor([[0.0, 1], [2, 0], [1, 1], [5, 3], [0, 0]], dtype=torch.float64)
    found = make_moments([L.Poisson()], outputs, y).result()
    rate = outputs.exp()
    torch.testing.assert_close(found.mean, rate.mean(0))
    torch.testing.assert_close(found.aleatoric.square(), rate.mean(0))
    torch.testing.assert_close(found.epistemic.square(), rate.var(0, correction=0))
    density = stats.poisson.logpmf(y.numpy(), rate.numpy()).sum(-1)
    torch.testing.assert_close(found.log_likelihood, torch.from_numpy(np.log(np.exp(density).mean(0))))
    torch.testing.assert_close(found.cdf(y), torch.from_numpy(stats.poisson.cdf(y.numpy(), rate.numpy()).mean(0)))
    for level in (0.1, 0.5, 0.95):
        grid = np.arange(200)
        mixture = stats.poisson.cdf(grid[:, None, None, None], rate.numpy()).mean(1)
        expected = (mixture < level).sum(0)
        assert found.quantile(level).tolist() == expected.tolist()


def test_crps_of_counts_is_the_sum_over_the_distribution_function() -> None:
    outputs, y = drawn(1), torch.tensor([[0.0], [2], [1], [5], [0]], dtype=torch.float64)
    found = make_moments([L.Poisson()], outputs, y).result().crps()
    grid = np.arange(300)
    mixture = stats.poisson.cdf(grid[:, None, None, None], outputs.exp().numpy()).mean(1)[:, :, 0]
    expected = ((mixture - (grid[:, None] >= y[:, 0].numpy())) ** 2).sum(0)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-4, rtol=1e-4)


def test_crps_of_values_is_that_of_very_many_samples() -> None:
    outputs, y = drawn(6), drawn(1)[0]
    found = make_moments([L.MixtureDensity(2)], outputs, y).result().crps()
    torch.manual_seed(0)
    samples = L.MixtureDensity(2).distribution(outputs).sample((4000,)).flatten(0, 1)
    expected = credo.evaluate.crps_samples_each(samples, y)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.02)


def test_pit_of_counts_is_uniform_where_the_prediction_is_right() -> None:
    rate = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    y = torch.poisson(rate, generator=torch.Generator().manual_seed(1))
    found = make_moments([L.Poisson()], rate.log().unsqueeze(0), y).result()
    pit = found.pit()
    assert stats.kstest(pit.flatten().numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(found.cdf(y).flatten().numpy(), "uniform").pvalue < 1e-6  # without the jump spread out
    low, high = found.interval(0.8)
    assert float(((low <= y) & (y <= high)).double().mean()) >= 0.8


def test_members_of_an_ensemble_use_their_own_scale() -> None:
    outputs, y = drawn(1)[:4], torch.zeros(ROWS, 1, dtype=torch.float64)
    scales = [0.5, 2.0]
    found = make_moments([L.StudentT(5, scale) for scale in scales], outputs, y).result()
    noise = torch.tensor(scales * 2, dtype=torch.float64).square() * 5 / 3
    torch.testing.assert_close(found.aleatoric.square(), noise.mean().expand(ROWS, 1), atol=1e-6, rtol=1e-6)
    scale = np.array(scales * 2)[:, None, None]
    density = stats.t.pdf(0.0, 5, outputs.numpy(), scale).mean(0)[:, 0]
    torch.testing.assert_close(found.log_likelihood, torch.from_numpy(np.log(density)), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        found.cdf(y), torch.from_numpy(stats.t.cdf(0.0, 5, outputs.numpy(), scale).mean(0)), atol=1e-6, rtol=0
    )


def test_rows_with_fewer_draws_leave_the_others_out() -> None:
    outputs, y = drawn(1), torch.ones(ROWS, 1, dtype=torch.float64)
    for likelihood in (L.Poisson(), L.StudentT(5, 1.0), L.Quantiles((0.4,)), L.MultiLabel()):
        moments = make_moments([likelihood], outputs[:3], y)
        rows = torch.tensor([1, 4])
        moments.add(outputs[3:, rows], rows)
        found = moments.result()
        assert found.draws_used.tolist() == [3, 7, 3, 3, 7]
        few, all_ = (make_moments([likelihood], part, y).result() for part in (outputs[:3], outputs))
        for name in ("log_likelihood", "epistemic"):
            value = getattr(found, name)
            torch.testing.assert_close(value[rows], getattr(all_, name)[rows])
            torch.testing.assert_close(value[[0, 2, 3]], getattr(few, name)[[0, 2, 3]])
        if isinstance(found, credo.DistributionPrediction):
            torch.testing.assert_close(found.cdf(y)[rows], all_.cdf(y)[rows])
            torch.testing.assert_close(found.cdf(y)[:1], few.cdf(y)[:1])


def test_labels_have_entropies_of_their_own_and_a_joint_likelihood() -> None:
    logits, y = drawn(3), torch.randint(0, 2, (ROWS, 3), generator=torch.Generator().manual_seed(0))
    found = make_moments([L.MultiLabel()], logits, y).result()
    p = logits.sigmoid()

    def entropy(q: Tensor) -> Tensor:
        return -(q * q.log() + (1 - q) * (1 - q).log())

    torch.testing.assert_close(found.probs, p.mean(0))
    torch.testing.assert_close(found.total, entropy(p.mean(0)))
    torch.testing.assert_close(found.aleatoric, entropy(p).mean(0))
    torch.testing.assert_close(found.epistemic, entropy(p.mean(0)) - entropy(p).mean(0))
    each = torch.where(y > 0, p, 1 - p).prod(-1)
    torch.testing.assert_close(found.log_likelihood, each.mean(0).log())


@pytest.mark.filterwarnings("ignore:Rows for calibration:credo.ReusedRowsWarning")
@pytest.mark.parametrize("method", ["bbb", "ivon", "vogn", "noisy-kfac", "laplace"])
def test_labels_that_are_not_known_are_as_if_they_were_not_there(method: str) -> None:
    """Of two labels one is never known, which leaves a network with one label."""
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = torch.stack([(x[:, 0] > 0).float(), torch.full((60,), -100.0)], 1)
    y[50:, 0] = -100  # nothing is known of these
    arguments: dict[str, Any] = {"data_size": 50, "likelihood": "multi-label", "random": ["weight"]}
    if method == "laplace":
        arguments["structure"] = "diag"
    found = []
    for labels in (2, 1):
        torch.manual_seed(0)
        net = nn.Linear(3, 2, bias=False)
        if labels == 1:
            whole, net = net, nn.Linear(3, 1, bias=False)
            net.weight.data = whole.weight.data[:1].clone()
        posterior = credo.methods.METHODS[method](net, **arguments)
        rows = 60 if labels == 2 else 50
        credo.fit(posterior, [(x[:rows], y[:rows, :labels])], epochs=3)
        prediction = credo.predict(posterior, [(x, y[:, :labels])], draws=2000)
        assert isinstance(prediction, credo.MultiLabelPrediction)
        metrics = credo.measure(prediction, intervals=False)
        calibrated = credo.calibrate(posterior, [(x[:50], y[:50, :labels])]).calibration
        assert calibrated is not None
        found.append([*(metrics[key] for key in ("accuracy", "exact_match", "nll", "ece")), calibrated.nll_before])
    assert found[0] == pytest.approx(found[1], rel=0.05, abs=0.03)


def test_quantiles_are_averaged_and_interpolated() -> None:
    outputs, y = drawn(3), torch.zeros(ROWS, 1, dtype=torch.float64)
    likelihood = L.Quantiles((0.1, 0.5, 0.9))
    found = make_moments([likelihood], outputs, y).result()
    quantiles = likelihood.quantiles(outputs).detach()
    torch.testing.assert_close(found.quantiles, quantiles.mean(0))
    torch.testing.assert_close(found.epistemic, quantiles.std(0, correction=0))
    torch.testing.assert_close(found.quantile(0.7), (found.quantiles[..., 1] + found.quantiles[..., 2]) / 2)
    low, high = found.interval(0.8)
    torch.testing.assert_close(low, found.quantiles[..., 0])
    torch.testing.assert_close(high, found.quantiles[..., 2])
    with pytest.raises(ValueError, match="outside the levels of training"):
        found.interval(0.95)


@pytest.mark.parametrize("class_dim", [-1, -2, -3])
def test_positions_are_predicted_as_rows_would_be(class_dim: int) -> None:
    logits = drawn(2, 3, 4).movedim(-1, class_dim)  # four classes at 2 × 3 positions
    y = torch.randint(0, 4, (ROWS, 2, 3), generator=torch.Generator().manual_seed(0))
    y[0, 0, 0] = -100
    found = make_moments([L.Categorical(class_dim=class_dim)], logits, y).result()
    rows = logits.movedim(class_dim, -1).flatten(1, 3)
    flat = make_moments([L.Categorical()], rows, y.flatten().clamp_min(0)).result()
    torch.testing.assert_close(found.probs.flatten(0, 2), flat.probs)
    torch.testing.assert_close(found.epistemic.flatten(), flat.epistemic)
    assert found.labels.shape == (ROWS, 2, 3)
    assert torch.isnan(found.log_likelihood[0, 0, 0])
    each = found.by_position()
    assert len(each) == ROWS * 6 - 1
    assert each.targets.tolist() == y.flatten()[1:].tolist()
    torch.testing.assert_close(each.log_likelihood, flat.log_likelihood[1:])
    metrics = credo.measure(found)
    labels = rows.softmax(-1).mean(0).argmax(-1)[1:]
    assert metrics["accuracy"] == pytest.approx(float((labels == y.flatten()[1:]).double().mean()))
    assert "intervals" not in metrics


@pytest.mark.parametrize("is_known", [True, False])
def test_batches_of_other_lengths_are_followed_by_positions_that_do_not_count(is_known: bool) -> None:
    torch.manual_seed(0)
    posterior = credo.MAP(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), data_size=8)
    words = [torch.randint(9, (4, 5)), torch.randint(9, (4, 3))]
    tags = [torch.randint(3, each.shape) for each in words]
    tags[0][0, 4] = -100
    batches = [(x, y) for x, y in zip(words, tags, strict=True)] if is_known else [(x,) for x in words]
    together = credo.predict(posterior, batches)
    assert isinstance(together, credo.DenseClassPrediction)
    alone = [credo.predict(posterior, [batch]) for batch in batches]
    assert together.probs.shape == (8, 5, 3)
    assert bool(together.finite.all())
    assert torch.equal(together.probs[4:, :3], alone[1].probs)
    assert torch.equal(together.labels[4:], F.pad(alone[1].labels, (0, 2), value=-1))
    assert len(together.by_position().probs) == (31 if is_known else 32)
    if is_known:
        assert together.targets is not None
        assert together.targets[4:, 3:].eq(-100).all()
        found = credo.measure(together, intervals=False)
        rows = torch.cat([each.by_position().log_likelihood for each in alone])
        assert found["nll"] == pytest.approx(-float(rows.mean()), rel=1e-6)


def test_mean_iou_counts_intersections_over_unions() -> None:
    labels, y = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 0]]), torch.tensor([[0, 1, 1, 1], [2, 2, 0, -1]])
    # class 0: 1 of {0, 1, 6}; class 1: 2 of 3; class 2: 2 of 3
    assert credo.evaluate.mean_iou(labels, y, 3) == pytest.approx((1 / 3 + 2 / 3 + 2 / 3) / 3)


def test_concordance_counts_known_pairs() -> None:
    times, seen = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 0, 1, 1])
    assert credo.evaluate.concordance(times, seen, times) == 1.0
    assert credo.evaluate.concordance(times, seen, -times) == 0.0
    # known pairs: 1 before 2, 3, 4 and 3 before 4; the prediction reverses the last
    assert credo.evaluate.concordance(times, seen, torch.tensor([1.0, 2, 4, 3])) == 0.75
    with pytest.raises(ValueError, match="No pair"):
        credo.evaluate.concordance(times, torch.zeros(4), times)


def cases() -> dict[str, tuple[Likelihood, Tensor, int]]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=g)
    f = x[:, :1]
    times = torch.cat([f.exp().clamp(max=2.0), (f.exp() < 2).float()], 1)
    return {
        "poisson": (L.Poisson(), torch.poisson(f.exp(), generator=g), 1),
        "negative-binomial": (L.NegativeBinomial(), torch.poisson(f.exp(), generator=g), 1),
        "student-t": (L.StudentT(), f, 1),
        "mixture-density": (L.MixtureDensity(2), f, 6),
        "quantiles": (L.Quantiles(), f, 3),
        "censored-times": (L.CensoredTimes(), times, 1),
        "multi-label": (L.MultiLabel(), (x > 0).float(), 3),
        "ordinal": (L.Ordinal(3), torch.bucketize(f[:, 0].contiguous(), torch.tensor([-0.5, 0.5])), 1),
        "weighted": (
            L.Categorical(class_weights=[1, 2, 0.5]),
            torch.bucketize(f[:, 0].contiguous(), torch.tensor([-0.5, 0.5])),
            3,
        ),
    }


METHODS = {
    "map": (credo.MAP, {}),
    "bbb": (credo.BBB, {}),
    "vogn": (credo.VOGN, {}),
    "ivon": (credo.IVON, {}),
    "noisy-kfac": (credo.NoisyKFAC, {"curvature": credo.KroneckerCurvature(fisher="sampled")}),
    "node": (credo.NodeBNN, {}),
    "mc-dropout": (credo.MCDropout, {}),
    "sghmc": (credo.SGHMC, {"burn_in": 0, "every": 1}),
}


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


def batches(y: Tensor) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))
    return [(x[:20], y[:20]), (x[20:], y[20:])]


@pytest.mark.part(20)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", cases())
def test_every_method_trains_predicts_saves_and_loads(kind: str, method: str, tmp_path: Path) -> None:
    likelihood, y, outputs = cases()[kind]
    make, options = METHODS[method]
    if kind == "quantiles" and method == "noisy-kfac":
        options = {}  # there is no distribution to draw targets from
    posterior = make(network(outputs), data_size=40, likelihood=likelihood, **options)
    before = [p.detach().clone() for p in posterior.parameters()]
    credo.fit(posterior, batches(y), epochs=2)
    assert any(not torch.equal(a, b) for a, b in zip(before, posterior.parameters(), strict=True))
    found = credo.predict(posterior, batches(y), draws=3)
    metrics = credo.measure(found, intervals=False)
    assert np.isfinite(metrics["nll"])
    path = tmp_path / "p.safetensors"
    credo.save(posterior, path)
    again = credo.predict(credo.load(path, model=network(outputs)), batches(y), draws=3)
    torch.testing.assert_close(again.log_likelihood, found.log_likelihood, atol=0, rtol=0)


@pytest.mark.part(10)
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("kind", cases())
def test_laplace_of_every_likelihood(kind: str, structure: str) -> None:
    likelihood, y, outputs = cases()[kind]
    posterior = credo.Laplace(network(outputs), data_size=40, likelihood=likelihood, structure=structure)
    posterior.fit(batches(y))
    found = credo.predict(posterior, batches(y), draws=3)
    assert np.isfinite(credo.measure(found, intervals=False)["nll"])
    assert float(found.epistemic.max()) > 0


@pytest.mark.parametrize("kind", ["gaussian", "poisson", "categorical"])
def test_weights_of_examples_are_repeated_rows(kind: str) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    targets = {"gaussian": x[:, :1], "poisson": x[:, :1].exp().round(), "categorical": (x[:, 0] > 0).long()}
    y, weight = targets[kind], torch.tensor([1.0, 2, 1, 3, 1, 2])
    repeated = torch.repeat_interleave(torch.arange(6), weight.long())
    outputs = 2 if kind == "categorical" else 1
    found = []
    for loader, weights in (([(x, y, weight)], lambda batch: batch[2]), ([(x[repeated], y[repeated])], None)):
        likelihood = credo.GaussianNoise(0.5) if kind == "gaussian" else kind
        posterior = credo.MAP(network(outputs), data_size=10, likelihood=likelihood)
        read = {"forward": lambda net, batch: net(batch[0]), "target": lambda batch: batch[1]}
        credo.fit(posterior, loader, epochs=3, weights=weights, **read)
        found.append(copy.deepcopy(posterior.model.state_dict()))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name])


def test_vogn_squares_of_class_weights_are_those_of_repeated_rows() -> None:
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0, 2])
    repeated = torch.repeat_interleave(torch.arange(6), torch.tensor([1, 2, 3])[y])
    found = []
    for likelihood, rows in ((L.Categorical(class_weights=[1, 2, 3]), slice(None)), (L.Categorical(), repeated)):
        posterior = credo.OGN(network(3), data_size=12, likelihood=likelihood)
        credo.fit(posterior, [(x[rows], y[rows])], epochs=2)
        found.append(posterior.state_dict())
    for name, value in found[0].items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(value, found[1][name], msg=name)


def test_segmentation_by_a_small_convolutional_network() -> None:
    g = torch.Generator().manual_seed(0)
    y = (torch.rand(24, 1, 4, 4, generator=g).repeat_interleave(2, 2).repeat_interleave(2, 3) > 0.5).long()[:, 0]
    x = y.unsqueeze(1) + 0.3 * torch.randn(24, 1, 8, 8, generator=g)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    posterior = credo.IVON(net, data_size=24, likelihood=L.Categorical(class_dim=-3))
    credo.fit(posterior, [(x[:12], y[:12]), (x[12:], y[12:])], epochs=40)
    found = credo.predict(posterior, [(x, y)], draws=8)
    assert isinstance(found, credo.DenseClassPrediction)
    assert found.epistemic.shape == (24, 8, 8)
    assert credo.measure(found)["mean_iou"] > 0.75
    assert F.cross_entropy(net(x), y) < 0.4


def test_likelihoods_that_a_function_does_not_support_are_named() -> None:
    posterior = credo.MAP(network(1), data_size=40, likelihood="poisson")
    y = cases()["poisson"][1]
    with pytest.raises(TypeError, match="Poisson"):
        credo.calibrate(posterior, batches(y))
    quantiles = credo.MAP(network(3), data_size=40, likelihood="quantiles")
    with pytest.raises(TypeError, match="not Quantiles"):
        credo.diagnose(quantiles, batches(cases()["quantiles"][1]))


@pytest.mark.filterwarnings("ignore:Nothing has learned")
@pytest.mark.parametrize("kind", cases())
def test_predictions_print_as_tables(kind: str) -> None:
    likelihood, y, outputs = cases()[kind]
    found = credo.predict(credo.MAP(network(outputs), data_size=40, likelihood=likelihood), batches(y)[0][0])
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "row"
    assert len(lines[0].split()) > 2
    assert len({len(line) for line in lines[:-1]}) == 1


def test_maps_print_as_shares_of_positions() -> None:
    logits = torch.zeros(1, 2, 3, 2, 2)
    logits[:, :, 1, 0] = 9
    found = make_moments([L.Categorical(class_dim=-3)], logits, None).result()
    assert "50% 50% 0%" in str(found)
