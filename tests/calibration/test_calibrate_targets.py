"""Calibration of pixels, tokens, several labels, ordered classes, counts, times and values that are not Gaussian."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo import BBB, MAP, Ensemble
from credo import likelihoods as L
from credo.calibration.choose import PRIOR, SCALES
from credo.core.likelihood import Likelihood

ROWS, DRAWS = 120, 6


class Network(nn.Module):
    """Outputs of any shape; not a Sequential, whose first layer would be sampled."""

    def __init__(self, *shape: int, gain: float = 2.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer, self.shape = nn.Linear(4, math.prod(shape)), shape
        with torch.no_grad():
            self.layer.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs.unflatten(-1, self.shape)


def inputs() -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2))


def dense_labels(*shape: int) -> Tensor:
    labels = (uniform(ROWS, *shape) * 3).long()
    labels[uniform(ROWS, *shape) < 0.3] = 9  # does not count
    return labels


CASES: dict[str, tuple[Callable[[], Likelihood], tuple[int, ...], Callable[[], Tensor]]] = {
    "poisson": (L.Poisson, (2,), lambda: (uniform(ROWS, 2) * 4).floor()),
    "negative-binomial": (lambda: L.NegativeBinomial(0.5), (1,), lambda: (uniform(ROWS, 1) * 4).floor()),
    "student-t": (lambda: L.StudentT(4, 0.5), (2,), lambda: uniform(ROWS, 2)),
    "mixture-density": (lambda: L.MixtureDensity(2), (6,), lambda: uniform(ROWS, 1)),
    "censored-times": (L.CensoredTimes, (1,), lambda: torch.stack([uniform(ROWS) + 0.1, uniform(ROWS).round()], 1)),
    "multi-label": (L.MultiLabel, (3,), lambda: uniform(ROWS, 3).round()),
    "ordinal": (lambda: L.Ordinal(4), (1,), lambda: (uniform(ROWS) * 4).long()),
    "tokens": (lambda: L.Categorical(ignore_index=9), (5, 3), lambda: dense_labels(5)),
    "pixels": (lambda: L.Categorical(class_dim=-3, ignore_index=9), (3, 2, 4), lambda: dense_labels(2, 4)),
}
WITH_TEMPERATURE = {"multi-label", "ordinal", "tokens", "pixels"}


def posterior_of(case: str) -> BBB:
    """With far too much noise for some, so that there is something to choose."""
    make, shape, _ = CASES[case]
    init = 1.0 if case == "censored-times" else 0.3
    return BBB(Network(*shape), data_size=100, init=init, likelihood=make())


@torch.no_grad()
def brute_force(likelihood: Likelihood, found: Tensor, y: Tensor, temperature: float) -> float:
    """The sum over rows of the NLL, each written down by itself."""
    if isinstance(likelihood, L.MultiLabel):
        each = -F.binary_cross_entropy_with_logits(found / temperature, y.double().expand_as(found), reduction="none")
        return -float((each.sum(-1).exp().mean(0)).log().sum())
    if isinstance(likelihood, L.DistributionLikelihood):
        density = torch.stack([likelihood.log_prob(one, y.double()).flatten(1).sum(1) for one in found])
        return -float(density.exp().mean(0).log().sum())
    assert isinstance(likelihood, L.Categorical | L.Ordinal)
    log_probs = likelihood.log_probs(found if isinstance(likelihood, L.Categorical) else found.squeeze(-1))
    probs = (log_probs / temperature).softmax(-1).mean(0)
    if isinstance(likelihood, L.Ordinal):
        return -float(probs.gather(-1, y.unsqueeze(-1)).log().sum())
    counted = y != likelihood.ignore_index
    nll = -probs[counted].gather(-1, y[counted].unsqueeze(-1)).log()
    return float(nll.mean()) * len(y)  # as many rows as images, not as positions


@pytest.mark.part(3)
@pytest.mark.parametrize("case", CASES)
def test_the_choice_is_the_minimum_of_a_brute_force_search(case: str) -> None:
    posterior, x, y = posterior_of(case), inputs(), CASES[case][2]()
    credo.calibrate(posterior, [*zip(x.split(50), y.split(50), strict=True)], draws=DRAWS)
    found = posterior.calibration
    assert found is not None
    assert found.std_factor == 1.0
    assert (found.temperature != 1.0) == (case in WITH_TEMPERATURE)

    def cost(scale: float, log_t: float) -> float:
        # Batches of 50, which each take the next draws.
        kept = torch.cat([outputs_of(index, scale, part) for index, part in enumerate(x.split(50))], 1)
        total = brute_force(posterior.likelihood, kept, y, math.exp(log_t))
        log_s = max(math.log(scale), math.log(1 / 8)) if scale else math.log(1 / 8)
        return total + 0.5 * PRIOR * (log_s**2 + log_t**2)

    def outputs_of(index: int, scale: float, a: Tensor) -> Tensor:
        draws = DRAWS if scale else 1
        means, results = posterior.mean(), []
        with torch.no_grad(), posterior.seeded(0):
            drawn = list(posterior.iter_draws(DRAWS * (index + 1)))[-draws:]
            for draw in drawn:
                moved = {name: means[name] + scale * (w - means[name]) for name, w in draw.items()}
                results.append(torch.func.functional_call(posterior.model, moved, (a,)))
        return torch.stack(results).double()

    best = cost(found.noise_scale, math.log(found.temperature))
    grid = [step / 10 for step in range(-10, 21)] if case in WITH_TEMPERATURE else [0.0]
    assert best <= min(cost(scale, log_t) for scale in SCALES for log_t in grid) + 1e-3


@pytest.mark.part(3)
@pytest.mark.filterwarnings("ignore:Nothing has learned")
@pytest.mark.parametrize("case", CASES)
def test_predictions_apply_it_and_have_the_nll_that_it_was_chosen_by(case: str, tmp_path: Path) -> None:
    posterior, rows = posterior_of(case), [(inputs(), CASES[case][2]())]
    plain = credo.measure(credo.predict(posterior, rows, draws=DRAWS), intervals=False)["nll"]
    credo.calibrate(posterior, rows, draws=DRAWS)
    found = posterior.calibration
    assert found is not None
    assert found.nll_before == pytest.approx(plain, abs=1e-5)
    assert found.nll_after < found.nll_before
    after = credo.predict(posterior, rows, draws=DRAWS)
    assert credo.measure(after, intervals=False)["nll"] < plain
    loaded = credo.load(credo.save(posterior, tmp_path / "p.safetensors"), model=Network(*CASES[case][1]))
    again = credo.predict(loaded, rows, draws=DRAWS)
    torch.testing.assert_close(again.log_likelihood, after.log_likelihood, equal_nan=True)


def test_the_right_temperature_of_labels_is_found() -> None:
    x = torch.randn(4000, 4, generator=torch.Generator().manual_seed(3))
    net = Network(3, gain=8.0)
    with torch.no_grad():
        y = (torch.rand(4000, 3, generator=torch.Generator().manual_seed(4)) < (net(x) / 2.5).sigmoid()).float()
    found = credo.calibrate(MAP(net, data_size=100, likelihood="multi-label"), [(x, y)]).calibration
    assert found is not None
    assert (found.noise_scale, found.std_factor) == (1.0, 1.0)
    assert found.temperature == pytest.approx(2.5, rel=0.1)


def test_large_images_are_thinned_by_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(inputs(), CASES["pixels"][2]())]
    whole = credo.calibrate(posterior_of("pixels"), rows, draws=DRAWS).calibration
    monkeypatch.setattr("credo.calibration.run_rows._MOST_BYTES", 4 * DRAWS * ROWS * 24 // 2)
    half = credo.calibrate(posterior_of("pixels"), rows, draws=DRAWS).calibration
    assert whole is not None
    assert half is not None
    assert half.rows == whole.rows == ROWS
    assert half.nll_before != whole.nll_before
    assert half.nll_before == pytest.approx(whole.nll_before, rel=0.1)


def test_members_of_an_ensemble_use_their_own_dispersion() -> None:
    members = [
        BBB(Network(1), data_size=100, init=0.3, seed=i, likelihood=L.NegativeBinomial(a))
        for i, a in enumerate((0.1, 3))
    ]
    rows = [(inputs(), CASES["negative-binomial"][2]())]
    posterior = Ensemble(members)
    plain = credo.measure(credo.predict(posterior, rows, draws=DRAWS), intervals=False)["nll"]
    found = credo.calibrate(posterior, rows, draws=DRAWS).calibration
    assert found is not None
    assert found.nll_before == pytest.approx(plain, abs=1e-5)


@pytest.mark.filterwarnings("ignore::credo.ReusedRowsWarning")
@pytest.mark.parametrize("case", ["tokens", "multi-label", "poisson"])
def test_laplace_is_calibrated_too(case: str) -> None:
    make, shape, y = CASES[case]
    x, targets = inputs(), y()
    posterior = credo.Laplace(Network(*shape), data_size=ROWS, structure="diag", likelihood=make(), prior=1.0)
    posterior.fit([(x, targets)])
    before = credo.measure(credo.predict(posterior, [(x, targets)], draws=DRAWS), intervals=False)["nll"]
    found = credo.calibrate(posterior, [(x, targets)], draws=DRAWS).calibration
    assert found is not None
    assert found.nll_before == pytest.approx(before, abs=2e-2)
    assert found.nll_after <= found.nll_before


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MAP(Network(1), data_size=9, likelihood="poisson"), "nothing to choose for MAP with Poisson"),
        (lambda: BBB(Network(3), data_size=9, likelihood="quantiles"), "Quantiles has no distribution"),
    ],
)
def test_what_has_nothing_to_choose_is_said(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        credo.calibrate(build(), [(inputs(), uniform(ROWS, 1).round())])


@pytest.mark.parametrize(
    ("case", "y", "message"),
    [
        ("tokens", torch.zeros(ROWS, 4).long(), r"Labels must have shape \[120, 5\]; got \[120, 4\]"),
        ("tokens", torch.full((ROWS, 5), 3), "Labels run from 3 to 3, but there are 3 classes"),
        ("multi-label", torch.zeros(ROWS, 2), r"Targets of shape \[120, 2\] for labels \[120, 3\]"),
        ("poisson", torch.full((ROWS, 2), -1.0), "the target -1 is not possible"),
    ],
)
def test_targets_that_do_not_fit_are_named(case: str, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.calibrate(posterior_of(case), [(inputs(), y)])
