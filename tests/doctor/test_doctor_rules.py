"""Every rule on both sides of its limits, on facts made by hand; and the limits as the documentation states them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from credo.doctor import limits
from credo.doctor.advice import wanted_std
from credo.doctor.dispersion import Dispersion
from credo.doctor.facts import Counts, Facts, Method
from credo.doctor.findings import Finding
from credo.doctor.gradients import GradientNoise
from credo.doctor.judge import judge
from credo.doctor.layers import LayerState
from credo.doctor.monte_carlo import MonteCarlo
from credo.doctor.objective import History, Objective
from credo.doctor.scores import Gap, Score, Scores
from credo.doctor.statistics import NormState, Statistics
from credo.evaluate.intervals import Interval

ARGUMENTS = frozenset({"temperature", "std_init", "kl_weight", "noise", "draws", "data_size"})


def interval(value: float, half: float = 0.01) -> Interval:
    return Interval(value, value - half, value + half)


def layer(name: str = "all", **changes: Any) -> LayerState:
    base = LayerState(name, 1000, 2, 2.0, [0.1, 1.0, 2.0, 3.0, 9.0], 0.05, 0.2, 0.1, 900.0)
    return dataclasses.replace(base, **changes)


def worse(nll: float, error: float = 0.0) -> Gap:
    return Gap(interval(nll, 0.001), interval(error, 0.001))


def poor(learned: float, gain: float = -0.1) -> dict[str, Any]:
    """Scores of a network that learned this much, with this many nats less than a constant where that is little."""
    return {"learned": learned, **({"chance_over_train": worse(gain)} if learned < 0.5 else {})}


# A posterior with nothing to complain about.
HEALTHY = Facts(
    method=Method("BBB", True, True, 1, True, "weights", False, None, ARGUMENTS),
    counts=Counts(1000, 1000, 10, 100, 1000, 500, True),
    objective=Objective(0.1, 900.0, 0.09, 0.1, 1.0, 0.1, 800.0, 900.0, 0.9),
    weights=layer(),
    layers=[layer("fc1.weight"), layer("fc1.bias", dims=1)],
    gradient=GradientNoise(1.0, 2.0, 1.0, 0.4, 0.1, 4, 8, 100),
    scores=Scores(
        metric="accuracy",
        mean=Score(0.95, 0.2),
        draw=Score(0.94, 0.25),
        lowest=0.9,
        highest=0.97,
        ensemble=Score(0.95, 0.2),
        twin=Score(0.95, 0.2),
        train=Score(0.99, 0.1),
        chance=Score(0.1, 2.3),
        learned=0.98,
        ensemble_over_mean=worse(0.0),
        ensemble_over_twin=worse(0.0),
        mean_over_twin=worse(0.0),
        chance_over_train=worse(2.0),
    ),
    statistics=None,
    dispersion=Dispersion(interval(1.0), interval(0.0), 0.2, {}),
    train_dispersion=Dispersion(interval(1.0), interval(0.0), 0.2, {"aleatoric": 0.5}),
    monte_carlo=MonteCarlo(32, 0.01, 0.001, 0.001, 0.001, 32),
    history=None,
)


def changed(**changes: dict[str, Any] | Any) -> Facts:
    """HEALTHY with fields of its parts replaced: `changed(scores={"learned": 0.1})`, or a part as a whole."""
    parts = {
        name: dataclasses.replace(getattr(HEALTHY, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(HEALTHY, **parts)


def named(facts: Facts, name: str) -> Finding | None:
    found = [finding for finding in judge(facts) if finding.name == name]
    assert len(found) <= 1
    return found[0] if found else None


def severity(facts: Facts, name: str) -> str | None:
    finding = named(facts, name)
    return None if finding is None else finding.severity


def test_nothing_is_found_in_a_healthy_one() -> None:
    assert judge(HEALTHY) == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(1000, None), (1090, None), (920, None), (1110, "warning"), (890, "warning"), (2000, "alarm"), (500, "alarm")],
)
def test_data_size(given: int, wanted: str | None) -> None:
    assert severity(changed(counts={"data_size": given}), "data-size") == wanted


def test_data_size_without_a_prior_is_a_note() -> None:
    facts = changed(counts={"data_size": 10}, method={"has_prior": False})
    assert severity(facts, "data-size") == "note"


@pytest.mark.parametrize(
    ("examples", "given", "wanted"), [(300, 360, None), (300, 401, "warning"), (310, 360, "warning")]
)
def test_a_dropped_last_batch_is_no_mistake(examples: int, given: int, wanted: str | None) -> None:
    """Batches of 100: 300 whole ones of 360 are what drop_last leaves; 300 of 401, or 310 of 360, are not."""
    assert severity(changed(counts={"examples": examples, "data_size": given}), "data-size") == wanted


@pytest.mark.parametrize(
    ("temperature", "weight", "learned", "wanted", "argument"),
    [
        (1.0, 1.0, 0.9, None, None),
        (1.4, 1.0, 0.9, None, None),
        (1.6, 1.0, 0.9, "warning", "temperature=1"),
        (9.0, 1.0, 0.9, "warning", "temperature=1"),
        (9.0, 1.0, 0.4, "alarm", "temperature=1"),
        (10.0, 1.0, 0.9, "alarm", "temperature=1"),
        (1.0, 50.0, 0.9, "alarm", "kl_weight='constant'"),
    ],
)
def test_temperature(temperature: float, weight: float, learned: float, wanted: Any, argument: Any) -> None:
    objective = {"temperature": temperature, "kl_weight": weight, "effective_temperature": temperature * weight}
    finding = named(changed(objective=objective, scores=poor(learned)), "prior-too-strong")
    assert (finding and finding.severity, finding and finding.argument) == (wanted, argument)


def test_no_kl_and_a_warm_up_cut_short() -> None:
    assert severity(changed(objective={"temperature": 0.0}), "no-prior") == "warning"
    assert severity(changed(objective={"kl_weight": 0.3}), "warm-up") == "note"
    assert severity(changed(objective={"kl_weight": 0.9}), "warm-up") is None


def statistics(shift: float, gain: float, accuracy: float) -> Statistics:
    state = NormState("bn1", shift, 0.0, shift, 0.0)
    return Statistics([state], shift, shift, Score(accuracy, 0.2), worse(gain))


@pytest.mark.parametrize(
    ("shift", "gain", "accuracy", "wanted"),
    [
        (0.2, 1.0, 0.95, None),  # no shift to speak of
        (0.3, 1.0, 0.95, "alarm"),
        (0.3, 0.04, 0.95, None),  # refreshing would not help
        (0.3, 1.0, 0.4, None),  # nor make it work
    ],
)
def test_stale_statistics(shift: float, gain: float, accuracy: float, wanted: str | None) -> None:
    assert severity(changed(statistics=statistics(shift, gain, accuracy)), "stale-statistics") == wanted


@pytest.mark.parametrize(
    ("cost", "pull", "gap", "learned", "wanted"),
    [
        (9000.0, 1000.0, 1.0, 0.9, None),  # balance 9
        (11_000.0, 1000.0, 1.0, 0.9, "alarm"),
        (11_000.0, 1000.0, 0.0, 0.9, None),  # harmless
        (11_000.0, 1000.0, 0.0, 0.4, "alarm"),
        (10.0, -500.0, 1.0, 0.9, "alarm"),  # wider than the prior
    ],
)
def test_noise_too_large(cost: float, pull: float, gap: float, learned: float, wanted: str | None) -> None:
    objective = {"noise_cost": cost, "noise_pull": pull, "noise_balance": cost / pull if pull > 0 else None}
    scores = {"ensemble_over_mean": worse(gap), **poor(learned)}
    assert severity(changed(objective=objective, scores=scores, weights={"snr": 0.9}), "noise-too-large") == wanted
    # Where the means stand out of the noise, it is not the noise that kept the network from learning.
    clear = changed(objective=objective, scores=scores, weights={"snr": 1.1})
    assert severity(clear, "noise-too-large") == (wanted if gap else None)


@pytest.mark.parametrize(
    ("snr", "balance", "learned", "effective", "collapsed", "wanted"),
    [
        (0.4, 0.5, 0.4, 0.1, 0.1, "noise-too-large"),
        (0.6, 0.5, 0.4, 0.1, 0.1, "not-learned"),
        (0.6, 3.5, 0.4, 0.1, 0.1, "noise-too-large"),
        (1.1, 3.5, 0.4, 0.1, 0.1, "not-learned"),
        (0.4, 0.5, 0.6, 0.1, 0.1, None),
        (0.4, 0.5, 0.4, 2.0, 0.1, "not-learned"),  # the KL may have done it
        (0.4, 0.5, 0.4, 0.1, 0.95, "collapsed"),
    ],
)
def test_a_network_that_was_never_heard(
    snr: float, balance: float, learned: float, effective: float, collapsed: float, wanted: str | None
) -> None:
    objective = {"noise_cost": balance * 900, "noise_balance": balance, "effective_temperature": effective}
    facts = changed(objective=objective, weights={"snr": snr, "collapsed": collapsed}, scores=poor(learned))
    assert [f.name for f in judge(facts) if f.severity == "alarm"] == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("share", "balance", "wanted"),
    [
        (0.02, 1e-5, None),
        (0.009, 1e-5, "warning"),
        (0.0009, 1e-5, "alarm"),
        (0.0009, 0.011, None),  # σ is about right: there is nothing left to doubt
        (0.0009, None, "warning"),
    ],
)
def test_no_uncertainty(share: float, balance: float | None, wanted: str | None) -> None:
    objective = {"noise_balance": balance, "noise_cost": None if balance is None else balance * 900}
    facts = changed(objective=objective, dispersion={"epistemic_share": share}, weights={"snr": 10.0})
    assert severity(facts, "no-uncertainty") == wanted
    assert (
        severity(dataclasses.replace(facts, method=dataclasses.replace(facts.method, random=False)), "no-uncertainty")
        is None
    )


@pytest.mark.parametrize(
    ("layers", "everything", "learned", "wanted"),
    [
        ([0.89, 0.1], 0.5, 0.9, None),
        ([0.91, 0.1], 0.5, 0.9, "warning"),
        ([0.1, 0.95], 0.5, 0.9, None),  # a bias
        ([0.95, 0.95], 0.95, 0.9, "warning"),
        ([0.95, 0.95], 0.95, 0.3, "alarm"),
    ],
)
def test_collapsed(layers: list[float], everything: float, learned: float, wanted: str | None) -> None:
    states = [layer("fc1.weight", collapsed=layers[0]), layer("fc1.bias", dims=1, collapsed=layers[1])]
    facts = changed(layers=states, weights={"collapsed": everything}, scores=poor(learned))
    assert severity(facts, "collapsed") == wanted


@pytest.mark.parametrize(
    ("ratio", "learned", "wanted"), [(9.0, 0.8, None), (11.0, 0.8, "warning"), (11.0, 0.95, "note")]
)
def test_gradient_noise(ratio: float, learned: float, wanted: str | None) -> None:
    facts = changed(gradient={"draw_variance": ratio}, scores={"learned": learned})
    finding = named(facts, "gradient-noise")
    assert (finding and finding.severity) == wanted
    if finding is not None:
        assert finding.argument == "noise='lrt'"
        quiet = dataclasses.replace(facts, method=dataclasses.replace(facts.method, noise="lrt"))
        assert named(quiet, "gradient-noise") is None


@pytest.mark.parametrize(
    ("z", "nll", "fixed", "wanted"),
    [
        (3.9, 2.0, True, None),
        (4.1, 2.0, True, "alarm"),
        (4.1, 0.5, True, "warning"),  # it still beats a constant: perhaps just not trained to the end
        (0.26, 0.5, True, None),
        (0.24, 0.5, True, "alarm"),
        (100.0, 2.0, False, None),
    ],
)
def test_noise_level(z: float, nll: float, fixed: bool, wanted: str | None) -> None:
    facts = changed(
        method={"fixed_noise_level": fixed},
        train_dispersion={"surprise": interval(z)},
        scores={"metric": "rmse", "train": Score(0.3, nll), "chance": Score(1.0, 1.4)},
    )
    finding = named(facts, "noise-level")
    assert (finding and finding.severity) == wanted
    if finding is not None:
        assert finding.argument == "likelihood=credo.GaussianNoise(std=0.3, learn=True)"


@pytest.mark.parametrize(
    ("nll", "error", "half", "wanted"),
    [
        (0.04, 0.0, 0.001, None),
        (0.06, 0.0, 0.001, "warning"),
        (0.06, 0.0, 0.07, None),  # may be chance
        (0.0, 0.009, 0.001, None),
        (0.0, 0.011, 0.001, "warning"),
    ],
)
def test_worse_than_twin_and_mean(nll: float, error: float, half: float, wanted: str | None) -> None:
    gap = Gap(interval(nll, half), interval(error, half))
    assert severity(changed(scores={"ensemble_over_twin": gap}), "worse-than-twin") == wanted
    assert severity(changed(scores={"ensemble_over_mean": gap}), "worse-than-mean") == wanted


def test_where_the_difference_to_the_twin_arises() -> None:
    gaps = {"ensemble_over_twin": worse(0.3), "mean_over_twin": worse(0.25), "ensemble_over_mean": worse(0.05)}
    finding = named(changed(scores=gaps), "worse-than-twin")
    assert finding is not None
    assert "+0.250 come from the mean weights, +0.050 from noise" in finding.text
    assert "KL holds them back" in finding.advice
    swapped = {**gaps, "mean_over_twin": worse(0.05), "ensemble_over_mean": worse(0.25)}
    finding = named(changed(scores=swapped), "worse-than-twin")
    assert finding is not None
    assert "The noise costs most" in finding.advice
    assert finding.argument == "temperature=0.01"


@pytest.mark.parametrize(
    ("value", "excess", "held_out", "wanted"),
    [
        (1.6, 0.2, True, "overconfident"),
        (1.505, 0.2, True, None),  # the interval reaches below 1.5
        (1.6, 0.09, True, None),  # too little to matter
        (0.6, -0.2, True, "underconfident"),
        (0.66, -0.2, True, None),
        (1.6, None, True, "overconfident"),  # a regression
        (1.6, 0.2, False, None),
    ],
)
def test_dispersion(value: float, excess: float | None, held_out: bool, wanted: str | None) -> None:
    found = {"surprise": interval(value), "excess": None if excess is None else interval(excess)}
    facts = changed(dispersion=found, counts={"held_out": held_out})
    names = [f.name for f in judge(facts) if f.severity == "warning"]
    assert names == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(("wanted_draws", "wanted"), [(32, None), (64, "note"), (128, "note"), (256, "warning")])
def test_draws(wanted_draws: int, wanted: str | None) -> None:
    finding = named(changed(monte_carlo={"wanted_draws": wanted_draws}), "few-draws")
    assert (finding and finding.severity) == wanted
    assert finding is None or finding.argument == f"draws={wanted_draws}"


@pytest.mark.parametrize(
    ("drop", "learned", "wanted"),
    [(0.04, 0.8, None), (0.06, 0.8, "warning"), (0.06, 0.95, "note"), (0.21, 0.95, "warning")],
)
def test_still_falling(drop: float, learned: float, wanted: str | None) -> None:
    facts = changed(history=History(16, [], [], [], drop), scores={"learned": learned})
    assert severity(facts, "still-falling") == wanted


@pytest.mark.parametrize(
    ("learned", "balance", "snr", "argument", "words"),
    [
        (0.6, 1.0, 0.4, None, None),
        (0.4, 1.0, 0.4, "temperature=0.01", "the KL outweighs the data"),
        (0.4, 1.0, 0.6, "epochs=20", "training is not at its end"),
        (0.4, 0.1, 0.4, "lr=0.0005", "are gone."),
        (0.4, 4.0, 0.4, "lr=0.0005", "are gone."),
    ],
)
def test_not_learned(learned: float, balance: float, snr: float, argument: str | None, words: str | None) -> None:
    method = {"lr": 0.005, "usual_lr": 0.001, "arguments": ARGUMENTS | {"lr"}}
    facts = changed(
        scores=poor(learned), objective={"noise_balance": balance}, gradient={"snr": snr}, method=method, epochs=10
    )
    finding = named(facts, "not-learned")
    assert (finding and finding.argument) == argument
    assert (finding is None) == (words is None)
    assert finding is None or finding.text.endswith(words + ("" if words == "are gone." else "."))


@pytest.mark.parametrize(
    ("gain", "snr", "twin", "wanted"),
    [
        (0.1, 0.4, 0.0, ["learned-little"]),  # better than a constant: perhaps the data hold no more
        (0.03, 0.4, 0.0, ["learned-little"]),
        (0.03, 0.6, 0.0, ["not-learned"]),  # next to nothing, and there is more to learn
        (0.0, 0.4, 0.0, ["not-learned"]),  # no better than a constant
        (0.1, 0.4, 0.3, ["not-learned"]),  # a twin shows that there is more
    ],
)
def test_little_is_an_alarm_only_where_more_was_to_be_had(
    gain: float, snr: float, twin: float, wanted: list[str]
) -> None:
    scores = {**poor(0.4, gain), "ensemble_over_twin": worse(twin)}
    found = judge(changed(scores=scores, gradient={"snr": snr}))
    assert [finding.name for finding in found] == wanted
    assert found[0].severity == ("note" if wanted == ["learned-little"] else "alarm")


@pytest.mark.parametrize(("gain", "gap", "wanted"), [(0.1, 0.0, False), (0.1, 0.2, True), (-0.1, 0.0, True)])
def test_weights_below_their_noise_are_no_harm_by_themselves(gain: float, gap: float, wanted: bool) -> None:
    scores = {**poor(0.4, gain), "ensemble_over_mean": worse(gap)}
    facts = changed(scores=scores, weights={"snr": 0.3})
    assert (named(facts, "noise-too-large") is not None) == wanted


@pytest.mark.parametrize(
    ("given", "argument"), [(1e-5, "lr=0.001"), (2e-4, "epochs=20"), (5e-3, "epochs=20"), (0.5, "lr=0.001")]
)
def test_a_learning_rate_far_from_the_usual_one_is_named(given: float, argument: str) -> None:
    method = {"lr": given, "usual_lr": 1e-3, "arguments": ARGUMENTS | {"lr"}}
    finding = named(changed(scores=poor(0.1), gradient={"snr": 0.6}, method=method, epochs=10), "not-learned")
    assert finding is not None
    assert finding.argument == argument


CLASSES = {"accuracy": 0.7, "confidence": 0.3, "entropy": 1.6, "classes": 10}


@pytest.mark.parametrize(
    ("confidence", "snr", "wanted"), [(0.3, 0.6, True), (0.3, 0.4, False), (0.61, 0.6, False), (0.59, 0.6, True)]
)
def test_still_learning(confidence: float, snr: float, wanted: bool) -> None:
    details = {**CLASSES, "confidence": confidence}
    unsure = {"surprise": interval(0.5), "excess": interval(-0.5), "details": details}
    facts = changed(dispersion=unsure, gradient={"snr": snr}, epochs=3)
    found = {finding.name: finding.argument for finding in judge(facts)}
    assert ("still-learning" in found) == wanted
    assert ("underconfident" in found) != wanted
    assert not wanted or found["still-learning"] == "epochs=6"


@pytest.mark.parametrize(
    ("std", "entropy", "wanted"), [(0.001, 1.0, "alarm"), (0.04, 1.0, None), (0.03, 1.0, "alarm"), (0.001, 2.0, None)]
)
def test_no_uncertainty_only_where_another_std_would_help(std: float, entropy: float, wanted: str | None) -> None:
    """The means are 0.1, so 0.05 would be advised: 1.25 and 1.67 times the σ that is. Entropy of 2 is near log 10."""
    facts = changed(
        objective={"noise_balance": 1e-5, "noise_cost": 0.009},
        weights={"std": std, "snr": 0.1 / std, "std_ratio": std},
        dispersion={"epistemic_share": 1e-4, "details": {**CLASSES, "entropy": entropy, "confidence": 0.7}},
    )
    assert wanted_std(facts) == pytest.approx(0.05)
    assert severity(facts, "no-uncertainty") == wanted


def test_a_curvature_too_large_to_learn() -> None:
    """VOGN and IVON divide their steps by the curvature: a tiny σ is then why nothing was learned."""
    tiny: dict[str, Any] = {
        "objective": {"noise_balance": 1e-9, "noise_cost": 1e-6},
        "dispersion": {"epistemic_share": 0.0},
        "weights": {"std": 1e-6, "snr": 1e5, "std_ratio": 1e-5},
    }
    natural = changed(scores=poor(0.0), method={"arguments": frozenset({"curvature_init"})}, **tiny)
    assert [f.name for f in judge(natural)] == ["no-uncertainty"]
    assert [f.name for f in judge(changed(scores=poor(0.0), **tiny))] == ["not-learned"]


@pytest.mark.parametrize(("first", "learned", "wanted"), [(4.5, 0.9, None), (4.7, 0.9, "warning"), (4.7, 0.3, "alarm")])
def test_a_noisy_start(first: float, learned: float, wanted: str | None) -> None:
    method = {"arguments": frozenset({"curvature_init", "temperature"})}
    history = History(10, [first, 2.0], [], [], 0.0)
    finding = named(changed(history=history, scores=poor(learned), method=method), "noisy-start")
    assert (finding and finding.severity) == wanted
    assert finding is None or (finding.argument or "").startswith("curvature_init=")


@pytest.mark.parametrize(
    ("share", "regression", "gap", "argument"),
    [
        (0.6, True, 0.0, "temperature=0.01"),
        (0.1, True, 0.0, "likelihood=credo.GaussianNoise(std=0.3, learn=True)"),
        (0.1, False, 0.2, "temperature=0.01"),
        (0.1, False, 0.0, "epochs=20"),
    ],
)
def test_what_makes_it_unsure(share: float, regression: bool, gap: float, argument: str) -> None:
    scores = {"ensemble_over_mean": worse(gap)} | (
        {"metric": "rmse", "ensemble": Score(0.31, 0.2)} if regression else {}
    )
    excess = None if regression else interval(-0.5)
    found = {"surprise": interval(0.2), "excess": excess, "epistemic_share": share}
    finding = named(changed(scores=scores, dispersion=found, epochs=10), "underconfident")
    assert finding is not None
    assert finding.argument == argument


def test_consequences_are_not_listed_beside_an_alarm() -> None:
    several = {
        "scores": {"ensemble_over_mean": worse(1.0), **poor(0.3)},
        "dispersion": {"surprise": interval(3.0), "excess": interval(1.0)},
    }
    assert [f.name for f in judge(changed(counts={"data_size": 10}, **several))] == ["data-size"]
    assert len(judge(changed(**several))) == 1  # not-learned, itself an alarm
    both = changed(counts={"data_size": 10}, statistics=statistics(1.0, 1.0, 0.95))
    assert [f.name for f in judge(both)] == ["data-size", "stale-statistics"]


def test_no_argument_that_the_method_does_not_take() -> None:
    bare = {"arguments": frozenset({"lr"})}
    hot = changed(method=bare, objective={"temperature": 100.0})
    finding = named(hot, "prior-too-strong")
    assert finding is not None
    assert finding.argument is None
    dropout = changed(method={"arguments": frozenset({"rate"}), "rate": 0.2}, scores={"ensemble_over_mean": worse(1.0)})
    finding = named(dropout, "worse-than-mean")
    assert finding is not None
    assert finding.argument == "rate=0.1"


def test_the_wanted_std_balances() -> None:
    """σ = 0.05 = 0.2·s, 1,000 weights: 800·q = 1000·(1 − 0.04·q) at q = 1.19, σ = 0.0546; half the means is 0.05."""
    assert wanted_std(HEALTHY) == pytest.approx(0.05)
    roomy = changed(weights={"snr": 10.0})
    assert wanted_std(roomy) == pytest.approx(0.05)  # 0.0546 to one digit
    costly = changed(weights={"snr": 10.0}, objective={"noise_cost": 80_000.0})
    assert wanted_std(costly) == pytest.approx(0.006)  # 0.05·√(1000/80040) = 0.0056
    free = changed(weights={"snr": 100.0}, objective={"noise_cost": 0.0})
    assert wanted_std(free) == pytest.approx(0.2)  # the prior's 0.25 to one digit
    assert wanted_std(changed(weights={"snr": 0.4})) == pytest.approx(0.01)  # half the means


def test_the_documentation_states_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", page, flags=re.MULTILINE))
    actual = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert set(stated) == set(actual)
    for name, value in actual.items():
        numbers = [float(number) for number in re.findall(r"[\d.]+", stated[name])]
        assert numbers == list(value if isinstance(value, tuple) else (value,)), name
