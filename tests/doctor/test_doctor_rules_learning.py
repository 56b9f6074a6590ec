"""Every rule on training progress, on both sides of its limits, on measurements made by hand."""

import pytest
from doctor_measurements import ARGUMENTS, CLASSES, changed, interval, named, poor, severity, worse

from credo.doctor.measure.objective import History
from credo.doctor.run_rules import run_rules


@pytest.mark.parametrize(
    ("drop", "learned", "wanted"),
    [(0.04, 0.8, None), (0.06, 0.8, "warning"), (0.06, 0.95, "note"), (0.21, 0.95, "warning")],
)
def test_still_falling(drop: float, learned: float, wanted: str | None) -> None:
    measured = changed(history=History(16, [], [], [], drop), scores={"learned": learned})
    assert severity(measured, "still-falling") == wanted


@pytest.mark.parametrize(
    ("learned", "balance", "snr", "argument", "words"),
    [
        (0.6, 1.0, 0.4, None, None),
        (0.4, 1.0, 0.4, "temperature=0.01", "the KL outweighs the data"),
        (0.4, 1.0, 0.6, "epochs=20", "training has not finished"),
        (0.4, 0.1, 0.4, "lr=0.0005", "on the training data"),
        (0.4, 4.0, 0.4, "lr=0.0005", "on the training data"),
    ],
)
def test_not_learned(learned: float, balance: float, snr: float, argument: str | None, words: str | None) -> None:
    method = {"lr": 0.005, "default_lr": 0.001, "arguments": ARGUMENTS | {"lr"}}
    measured = changed(
        scores=poor(learned), objective={"noise_balance": balance}, gradient={"snr": snr}, method=method, epochs=10
    )
    finding = named(measured, "not-learned")
    assert (finding and finding.argument) == argument
    assert (finding is None) == (words is None)
    assert finding is None or finding.text.endswith(words + ".")


@pytest.mark.parametrize(
    ("gain", "snr", "baseline", "wanted"),
    [
        (0.1, 0.4, 0.0, ["learned-little"]),  # better than a constant: perhaps the data hold no more
        (0.03, 0.4, 0.0, ["learned-little"]),
        (0.03, 0.6, 0.0, ["not-learned"]),  # next to nothing, and there is more to learn
        (0.0, 0.4, 0.0, ["not-learned"]),  # no better than a constant
        (0.1, 0.4, 0.3, ["not-learned"]),  # a baseline shows that there is more
    ],
)
def test_little_is_an_alarm_only_where_more_was_to_be_had(
    gain: float, snr: float, baseline: float, wanted: list[str]
) -> None:
    scores = {**poor(0.4, gain), "ensemble_over_baseline": worse(baseline)}
    found = run_rules(changed(scores=scores, gradient={"snr": snr}))
    assert [finding.name for finding in found] == wanted
    assert found[0].severity == ("note" if wanted == ["learned-little"] else "alarm")


@pytest.mark.parametrize(
    ("given", "argument"), [(1e-5, "lr=0.001"), (2e-4, "epochs=20"), (5e-3, "epochs=20"), (0.5, "lr=0.001")]
)
def test_a_learning_rate_far_from_the_default_is_named(given: float, argument: str) -> None:
    method = {"lr": given, "default_lr": 1e-3, "arguments": ARGUMENTS | {"lr"}}
    finding = named(changed(scores=poor(0.1), gradient={"snr": 0.6}, method=method, epochs=10), "not-learned")
    assert finding is not None
    assert finding.argument == argument


@pytest.mark.parametrize(
    ("confidence", "snr", "wanted"), [(0.3, 0.6, True), (0.3, 0.4, False), (0.61, 0.6, False), (0.59, 0.6, True)]
)
def test_still_learning(confidence: float, snr: float, wanted: bool) -> None:
    details = {**CLASSES, "confidence": confidence}
    unsure = {"surprise": interval(0.5), "excess": interval(-0.5), "details": details}
    measured = changed(dispersion=unsure, gradient={"snr": snr}, epochs=3)
    found = {finding.name: finding.argument for finding in run_rules(measured)}
    assert ("still-learning" in found) == wanted
    assert ("underconfident" in found) != wanted
    assert not wanted or found["still-learning"] == "epochs=6"


@pytest.mark.parametrize(("first", "learned", "wanted"), [(4.5, 0.9, None), (4.7, 0.9, "warning"), (4.7, 0.3, "alarm")])
def test_a_noisy_start(first: float, learned: float, wanted: str | None) -> None:
    method = {"arguments": frozenset({"curvature.init", "temperature"})}
    history = History(10, [first, 2.0], [], [], 0.0)
    finding = named(changed(history=history, scores=poor(learned), method=method), "noisy-start")
    assert (finding and finding.severity) == wanted
    assert finding is None or (finding.argument or "").startswith("curvature={")
