"""Conformal scores against the slow, obvious way; plain arrays and predictions; what rivals get wrong."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import credo
from credo import FewRowsWarning
from credo.core.held_out.conformal import conformal_from, coverage_of
from credo.core.held_out.conformal_scores import aps_scores, rank_of, row_uniforms, rows_needed
from credo.core.support.binomial import beta_quantile, binomial_cdf
from credo.evaluate import augrc, auroc, correct, interval_metrics, risk_control, risk_metrics, set_metrics
from credo.evaluate.guarantees.raps import _sizes


def class_rows(count: int, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(count, classes, generator=generator)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(1)


def slow_score(probs: list[float], label: int, u: float, penalty: float, k_reg: int) -> float:
    """Mass of more probable classes, and u of the mass of those that are as probable."""
    above = sum(p for p in probs if p > probs[label])
    tied = sum(p for p in probs if p == probs[label])
    rank = 1 + sum(p > probs[label] for p in probs)
    return above + u * tied + penalty * max(rank - k_reg, 0)


@pytest.mark.parametrize(("penalty", "k_reg"), [(0.0, 0), (0.2, 2)])
def test_aps_scores_are_those_of_the_slow_way_with_ties_too(penalty: float, k_reg: int) -> None:
    probs = torch.cat(
        [class_rows(20)[0].double(), torch.tensor([[0.25, 0.25, 0.0, 0.25, 0.25], [0.1, 0.4, 0.1, 0.4, 0.0]])]
    )
    u = torch.rand(len(probs), generator=torch.Generator().manual_seed(0))
    found = aps_scores(probs, u, penalty=penalty, k_reg=k_reg)
    wanted = [[slow_score(row, c, v, penalty, k_reg) for c in range(5)] for row, v in zip(probs.tolist(), u.tolist())]  # noqa: B905
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-12)
    order = torch.tensor([3, 1, 4, 0, 2])  # the numbering of the classes does not matter
    assert torch.allclose(aps_scores(probs[:, order], u, penalty=penalty, k_reg=k_reg), found[:, order], atol=1e-12)


def test_raps_is_regularised_and_is_not_aps() -> None:
    probs = class_rows(2000, 20)[0]
    y = torch.multinomial(probs**3, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)  # the tail is too long
    probs, y, new = probs[:1500], y[:1500], probs[1500:]
    aps, raps = (credo.conformal(probs, y, 0.05, kind, randomised=False) for kind in ("aps", "raps"))
    assert raps.penalty > 0  # type: ignore[union-attr]
    assert (raps.rows, raps.chosen_on) == ((1000,), 500)  # type: ignore[union-attr]
    assert f"penalty {raps.penalty:g} beyond {raps.k_reg} classes (chosen on 500 other rows)" in repr(raps)  # type: ignore[union-attr]
    assert raps.sets(new).sum() < aps.sets(new).sum()  # type: ignore[union-attr]
    assert raps.sets(new).sum(1).max() < aps.sets(new).sum(1).max()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is APS"):
        credo.conformal(probs, y, 0.05, "raps", penalty=0.0)


def test_raps_is_aps_where_no_penalty_makes_sets_smaller() -> None:
    """At a strict level, where one row in ten is hard: any penalty would give easy rows large sets, too."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.where(torch.rand(3000, 1, generator=generator) < 0.1, 0.3, 8.0)
    probs = (scale * torch.randn(3000, 10, generator=generator)).softmax(-1)
    y = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    given, labels, new = probs[:1500], y[:1500], probs[1500:]
    aps, chosen = (credo.conformal(given, labels, 0.02, kind) for kind in ("aps", "raps"))
    fixed = credo.conformal(given, labels, 0.02, "raps", penalty=0.1, k_reg=1)
    sizes = [float(sets.sets(new).sum(1).double().mean()) for sets in (aps, chosen, fixed)]  # type: ignore[union-attr]
    assert chosen.penalty < 0.01  # type: ignore[union-attr]
    assert chosen.chosen_on == 500  # type: ignore[union-attr]
    assert sizes[1] < 1.05 * sizes[0]
    assert sizes[2] > 1.2 * sizes[0]


def test_what_is_given_of_raps_is_kept_and_the_rest_is_chosen() -> None:
    probs, y = class_rows(1000, 10)
    assert credo.conformal(probs, y, 0.1, "raps", penalty=0.3).penalty == 0.3  # type: ignore[union-attr]
    assert credo.conformal(probs, y, 0.1, "raps", k_reg=3).k_reg == 3  # type: ignore[union-attr]
    both = credo.conformal(probs, y, 0.1, "raps", penalty=0.3, k_reg=3)
    assert (both.rows, both.chosen_on) == ((1000,), 0)  # type: ignore[union-attr]


def test_sizes_for_the_choice_are_those_of_the_sets() -> None:
    probs, y = class_rows(200, 6)
    for allow_empty in (True, False):
        for randomised in (True, False):
            options: dict[str, Any] = {"allow_empty": allow_empty, "randomised": randomised}
            sets = credo.conformal(probs, y, 0.4, "raps", penalty=0.2, k_reg=1, **options)
            assert isinstance(sets, credo.ConformalSets)
            found = _sizes(sets, probs, y, torch.arange(200)[None])
            assert float(found) == pytest.approx(float(sets.sets(probs).sum(1).double().mean()), abs=1e-12)


def test_too_few_rows_to_choose_a_penalty_are_said_and_give_aps() -> None:
    probs, y = class_rows(200)
    with pytest.warns(FewRowsWarning, match=r"200 calibration rows are too few .* needs 240: these sets are those of"):
        found = credo.conformal(probs, y, 0.1, "raps")
    assert "RAPS without a penalty, which is APS, 90 % coverage" in repr(found)
    assert torch.equal(found.sets(probs), credo.conformal(probs, y, 0.1, "aps").sets(probs))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
def test_sets_are_not_empty_unless_allowed(kind: str) -> None:
    probs, y = (4 * torch.eye(3)).repeat(40, 1).add(0.01 * torch.randn(120, 3)).softmax(-1), torch.arange(3).repeat(40)
    fixed: dict[str, Any] = {"penalty": 0.1, "k_reg": 1} if kind == "raps" else {}
    loose, strict = (credo.conformal(probs, y, 0.4, kind, allow_empty=allow, **fixed) for allow in (True, False))
    assert bool((loose.sets(probs).sum(1) == 0).any())  # type: ignore[union-attr]
    assert torch.equal(strict.sets(probs), loose.sets(probs) | (probs == probs.amax(1, keepdim=True)))  # type: ignore[union-attr]


def test_yes_or_no_from_one_probability() -> None:
    both, y = class_rows(200, 2)
    from_both, from_one = credo.conformal(both, y), credo.conformal(both[:, 1], y.bool(), kind="lac")
    assert from_one.thresholds == pytest.approx(from_both.thresholds, abs=1e-6)
    sets = from_one.sets(both[:, 1])  # type: ignore[union-attr]
    assert sets.shape == (200, 2)
    assert 0.88 < float(sets.gather(1, y[:, None]).double().mean()) < 0.95


def test_u_is_a_function_of_the_row_and_spread_evenly() -> None:
    probs = class_rows(5000)[0]
    u = row_uniforms(probs)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(row_uniforms(probs[100:200]), u[100:200])
    assert torch.equal(row_uniforms(probs.flip(0)).flip(0), u)


@pytest.mark.parametrize(
    ("alpha", "rows", "rank"), [(0.1, 9, 9), (0.1, 99, 90), (0.3, 9, 7), (0.05, 19, 19), (0.1, 8, 9)]
)
def test_the_rank_is_that_of_the_decimal_number(alpha: float, rows: int, rank: int) -> None:
    assert rank_of(alpha, rows) == rank
    assert rank_of(alpha, rows_needed(alpha)) == rows_needed(alpha)
    assert rank_of(alpha, rows_needed(alpha) - 1) > rows_needed(alpha) - 1


def test_too_few_rows_give_everything_and_say_how_many_are_needed() -> None:
    probs, y = class_rows(18)
    with pytest.warns(FewRowsWarning, match=r"18 calibration rows are too few for alpha=0.05, which needs 19"):
        found = credo.conformal(probs, y, 0.05)
    assert found.sets(probs).all()  # type: ignore[union-attr]
    assert found.coverage.mean == 1
    with pytest.warns(FewRowsWarning, match=r"of 5 classes .* needs 19 of each: sets contain these classes always"):
        credo.conformal(*class_rows(60), 0.05, by_class=True)
    with pytest.warns(FewRowsWarning, match="intervals are infinite"):
        ends = credo.conformal(torch.zeros(5), torch.randn(5), 0.1, "split").intervals(torch.zeros(3))  # type: ignore[union-attr]
    assert torch.stack(ends).isinf().all()
    assert "19 rows needed" in repr(found)


def test_limits_are_those_of_scipy() -> None:
    for level, a, b in [(0.025, 91, 10), (0.975, 1, 40), (0.5, 900, 100), (0.01, 3, 1)]:
        assert beta_quantile(level, a, b) == pytest.approx(stats.beta.ppf(level, a, b), abs=1e-12)
    for k, n, p in [
        (0, 10, 0.1),
        (30, 100, 0.2),
        (99, 100, 0.99),
        (100, 100, 0.5),
        (-1, 5, 0.5),
        (3, 5, 0.0),
        (3, 5, 1.0),
    ]:
        assert binomial_cdf(k, n, p) == pytest.approx(stats.binom.cdf(k, n, p), abs=1e-12)
    assert (beta_quantile(0.5, 0, 3), beta_quantile(0.5, 3, 0)) == (0.0, 1.0)


def test_coverage_is_in_the_representation_with_the_warning_about_shift() -> None:
    found = credo.conformal(*class_rows(999), 0.1)
    low, high = stats.beta.ppf([0.025, 0.975], 900, 100)
    assert (found.coverage.low, found.coverage.high) == pytest.approx((low, high))
    assert f"between {100 * low:.1f} and {100 * high:.1f} %" in repr(found)
    assert "not under shift" in repr(found)


def test_predictions_and_arrays_give_the_same() -> None:
    network = torch.nn.Linear(3, 4)
    x, y = torch.randn(120, 3), torch.randint(4, (120,))
    prediction = credo.predict(credo.MAP(network, data_size=10), [(x, y)])
    assert credo.conformal(prediction) == credo.conformal(prediction.probs.numpy(), y.numpy())
    values = credo.predict(
        credo.MAP(network, data_size=10, likelihood=credo.GaussianNoise(1.0)), [(x, torch.randn(120, 4))]
    )
    targets = values.targets
    normalised = credo.conformal(values)
    assert normalised == credo.conformal((values.mean, values.total), targets, kind="normalised")
    assert credo.conformal(values, kind="split") == credo.conformal(values.mean, targets, kind="split")
    lower, upper = normalised.intervals(values)  # type: ignore[union-attr]
    assert torch.allclose(upper - values.mean, normalised.thresholds[0] * values.total.double(), atol=1e-6)
    assert interval_metrics(lower, upper, targets)["coverage"] >= 0.9


def test_arrays_that_are_read_only_reversed_or_of_other_forms_are_read(recwarn: pytest.WarningsRecorder) -> None:
    probs, y = (part.numpy() for part in class_rows(120))
    wanted = credo.conformal(probs, y)
    fixed = probs.copy()
    fixed.setflags(write=False)
    assert credo.conformal(fixed, y) == wanted
    assert credo.conformal(probs[::-1], y[::-1]) == wanted
    assert credo.conformal(probs.astype(">f4"), y[:, None], kind="lac") == wanted
    assert torch.equal(wanted.sets(fixed[::-1]).flip(0), wanted.sets(probs))  # type: ignore[union-attr]
    column = credo.conformal(probs[:, 0], y, kind="split")
    assert credo.conformal(probs[:, 0], y[:, None], kind="split") == column
    assert credo.conformal(probs, y[:, None]) == wanted
    labels = (probs > 0.3).astype(int)
    some = credo.conformal(probs[::-1], labels[::-1], 0.2, "fnr", classes=np.array([1, 2]))
    assert some == credo.conformal(probs, labels, 0.2, "fnr", classes=[1, 2])
    assert not recwarn.list


def test_a_penalty_is_kept_where_rows_are_too_few_to_choose_the_rest() -> None:
    with pytest.warns(FewRowsWarning, match="needs 240: k_reg is 1"):
        found = credo.conformal(*class_rows(40), 0.1, "raps", penalty=0.3)
    assert found == credo.conformal(*class_rows(40), 0.1, "raps", penalty=0.3, k_reg=1)


def test_a_few_deviations_of_zero_do_not_matter() -> None:
    std = torch.ones(100)
    std[:5] = 0
    found = credo.conformal((torch.zeros(100), std), torch.linspace(1, 2, 100), 0.1, "normalised")
    assert 1.9 < found.thresholds[0] < 2


def test_abstention_takes_arrays_and_the_probability_of_a_yes() -> None:
    generator = np.random.default_rng(0)
    yes = generator.random(400)
    y = (generator.random(400) < yes).astype(int)
    unsure = np.minimum(yes, 1 - yes)
    found = risk_control(yes, y, unsure, max_error=0.2)  # type: ignore[arg-type]
    both = torch.stack([1 - torch.from_numpy(yes), torch.from_numpy(yes)], -1)
    assert found == risk_control(both, torch.from_numpy(y), torch.from_numpy(unsure), max_error=0.2)
    assert float(found.accepts(unsure).double().mean()) == found.accepted > 0.1  # type: ignore[arg-type]


def test_narrow_quantiles_that_cross_leave_a_point() -> None:
    y = torch.zeros(99)
    found = credo.conformal((y - 1, y + 1), y, 0.1, "cqr")
    assert found.thresholds == (-1.0,)
    lower, upper = found.intervals((torch.tensor([-0.5]), torch.tensor([0.7])))  # type: ignore[union-attr]
    assert torch.equal(lower, upper)
    assert float(lower) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda p, y: credo.conformal(p, y, 0.0), "alpha"),
        (lambda p, y: credo.conformal(p, y, kind="apps"), "Did you mean 'aps'"),
        (lambda p, y: credo.conformal(p), "give y"),
        (lambda p, y: credo.conformal((p, p), y), "kind='split' for means|may be many things"),
        (lambda p, y: credo.conformal(p[:, 0], y), "may be many things"),
        (lambda p, y: credo.conformal(5 * p, y), "look like logits"),
        (lambda p, y: credo.conformal(p, y[:5]), "labels have shape"),
        (lambda p, y: credo.conformal(p[:, 0], p[:, 1], kind="cqr"), "tuple \\(lower, upper\\)"),
        (lambda p, y: credo.conformal((p, -p), p, kind="normalised"), "negative"),
        (lambda p, y: credo.conformal(p, p, kind="split", by_class=True), "by_class"),
        (lambda p, y: credo.conformal(p, y).sets(p[:, :3]), "for \\[n, 5\\]"),
        (lambda p, y: credo.conformal(p * math.nan, p, kind="split"), "NaN"),
        (lambda p, y: credo.conformal(p, y, kind="aps", penalty=0.1), "penalty and k_reg are for kind='raps'"),
        (lambda p, y: credo.conformal(p, p > 0.5, kind="lac"), r"labels have shape \[50, 5\]"),
        (lambda p, y: credo.conformal(None, y, kind="split"), "numbers is needed, got NoneType"),
        (lambda p, y: credo.conformal([[0.5, 0.5], [1.0]], [0, 1]), "rows of one length"),
        (lambda p, y: credo.conformal((p, 0 * p), p + 1, kind="normalised"), "deviations of 50 of 50 .* kind='split'"),
        (lambda p, y: credo.conformal(p, p > 0.5, kind="fnr", classes=1.5), "classes=1.5 must be indices"),
    ],
)
def test_wrong_arguments_are_explained(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given(*class_rows(50))


def test_json_round_trip_and_damage() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewRowsWarning)
        every = [
            credo.conformal(*class_rows(60), 0.05, "raps", by_class=True, penalty=0.2, k_reg=1),
            credo.conformal(torch.zeros(30, 2), torch.randn(30, 2), kind="split"),
        ]
    for found in every:
        assert conformal_from(found.to_dict()) == found
    assert conformal_from(None) is None
    good = every[1].to_dict()
    for damaged in (
        3,
        {"kind": "lac"},
        good | {"alpha": 2},
        good | {"kind": "sale"},
        good | {"rows": []},
        good | {"rows": [0.5]},
    ):
        with pytest.raises(ValueError):
            conformal_from(damaged)


def test_set_metrics_by_hand() -> None:
    sets = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    found = set_metrics(sets, torch.tensor([0, 1, 2, 2]))
    assert (found["coverage"], found["size"], found["empty"], found["singletons"]) == (0.75, 1.5, 0.25, 0.25)
    assert (found["worst_class_coverage"], found["sizes"]) == (0.5, [1, 1, 1, 1])
    exact = stats.binomtest(3, 4).proportion_ci(method="exact")
    assert found["intervals"]["coverage"] == pytest.approx([exact.low, exact.high])


def test_metrics_of_sets_and_intervals_take_arrays() -> None:
    probs, y = class_rows(40)
    sets, values = probs > 0.2, probs[:, 0]
    assert set_metrics(sets.numpy(), y.numpy()[:, None]) == set_metrics(sets, y)  # type: ignore[arg-type]
    ends = values - 0.1, values + 0.1, probs[:, 1]
    assert interval_metrics(*(part.numpy() for part in ends)) == interval_metrics(*ends)  # type: ignore[arg-type]
    true = probs > 0.3
    assert risk_metrics(sets.numpy(), true.numpy()) == risk_metrics(sets, true)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels run from 0 to 9; 5 classes"):
        set_metrics(sets, torch.arange(40) % 10)


def test_a_posterior_takes_inputs_and_targets_as_one_argument() -> None:
    posterior = credo.MAP(torch.nn.Linear(3, 4), data_size=10)
    with pytest.raises(ValueError, match=r"give a posterior one argument, \[\(inputs, targets\)\]"):
        credo.conformal(posterior, torch.zeros(20, 3), torch.zeros(20, dtype=torch.long))  # type: ignore[arg-type]


def test_augrc_is_the_published_function_of_auroc_and_accuracy() -> None:
    probs, y = class_rows(300)
    uncertainty = (10 * (1 - probs.amax(1))).round()  # with many ties
    right = correct(probs, y)
    accuracy, area = float(right.double().mean()), auroc(uncertainty[~right], uncertainty[right])
    wanted = (1 - area) * accuracy * (1 - accuracy) + 0.5 * (1 - accuracy) ** 2
    assert augrc(probs, y, uncertainty) == pytest.approx(wanted, abs=1e-12)


def test_risk_control_takes_the_largest_threshold_that_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    uncertainty = torch.rand(1000, generator=generator)
    wrong = torch.rand(1000, generator=generator) < 0.3 * uncertainty
    probs = torch.tensor([[0.9, 0.1]]).repeat(1000, 1)
    found = risk_control(probs, wrong.long(), uncertainty, max_error=0.1, confidence=0.9, thresholds=10)
    passes = []
    for step in range(1, 11):
        end = math.inf if step == 10 else float(uncertainty.sort().values[100 * step])
        taken = uncertainty < end
        p = stats.binom.cdf(int(wrong[taken].sum()), int(taken.sum()), 0.1)
        passes += [end] if p <= 0.1 / 10 else []
    assert found.threshold == max(passes)
    assert found.bound <= 0.1
    assert 0 < found.accepted < 1
    assert float(found.accepts(uncertainty).double().mean()) == found.accepted
    none = risk_control(probs, torch.ones(1000, dtype=torch.long), uncertainty, max_error=0.1)
    assert (none.threshold, none.accepted) == (-math.inf, 0.0)
    assert not none.accepts(uncertainty).any()
    everything = risk_control(probs, torch.zeros(1000, dtype=torch.long), uncertainty, max_error=0.1)
    assert everything.accepted == 1
    with pytest.raises(ValueError, match="max_error"):
        risk_control(probs, wrong.long(), uncertainty, max_error=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"k_reg": 1.7}, "k_reg=1.7 a count"), ({"k_reg": -1}, "k_reg=-1 a count"), ({"penalty": "a"}, "penalty='a'")],
)
def test_numbers_of_raps_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.conformal(torch.full((20, 2), 0.5), torch.zeros(20, dtype=torch.long), kind="raps", **options)


def test_swapped_quantiles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pass \(lower, upper\) in this order"):
        credo.conformal((torch.ones(20), -torch.ones(20)), torch.zeros(20), kind="cqr")


@pytest.mark.filterwarnings("ignore::credo.FewRowsWarning")
def test_an_absent_class_does_not_stand_for_the_coverage_of_the_others() -> None:
    probs = torch.rand(200, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    found = credo.conformal(probs, torch.arange(200) % 2, by_class=True)
    assert found.rows == (100, 100, 0)
    assert found.coverage == coverage_of(100, 0.1)
    assert "from 100 rows or more of each class" in repr(found)
    assert "1 of 3 thresholds are infinite" in repr(found)


def test_a_largest_error_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="max_error='a' must lie between 0 and 1"):
        risk_control(torch.full((4, 2), 0.5), torch.zeros(4, dtype=torch.long), torch.zeros(4), max_error="a")  # type: ignore[arg-type]


def test_predictions_beside_a_new_choice_keep_their_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sets of the posterior were switched off for everybody while it was chosen again."""
    torch.manual_seed(0)
    posterior = credo.BBB(torch.nn.Linear(3, 4), data_size=50)
    x, y = torch.randn(50, 3), torch.arange(50) % 4
    credo.conformal(posterior, [(x, y)])
    kept = []

    def between(net: torch.nn.Module, batch: Any) -> Any:
        if not kept:
            kept.append(posterior.conformal)
        return net(batch[0])

    credo.conformal(posterior, [(x, y)], alpha=0.2, forward=between)
    assert kept[0] is not None
    assert kept[0].alpha == 0.1
