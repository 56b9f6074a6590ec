"""Networks broken on purpose are diagnosed as what they are, healthy ones raise no alarm, and the advice cures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.doctor import Diagnosis

Trained = Callable[..., Any]
Examine = Callable[..., Diagnosis]
pytestmark = pytest.mark.slow
SEEDS = (0, pytest.param(1, marks=pytest.mark.grid))
KINDS = [("mlp", 0), ("conv", 0), *(pytest.param("mlp", seed, marks=pytest.mark.grid) for seed in (1, 2))]


def first(diagnosis: Diagnosis) -> tuple[str, str, str | None]:
    """The first finding, or the one that it gives as its cause."""
    finding = diagnosis.findings[0]
    if finding.name == "worse-than-constant" and finding.advice.startswith("See "):
        cause = diagnosis.findings[1]
        assert finding.advice == f"See {cause.name}: {cause.advice}"
        assert finding.argument == cause.argument
        return cause.name, cause.severity, cause.argument
    return finding.name, finding.severity, finding.argument


def no_alarm(diagnosis: Diagnosis) -> bool:
    assert diagnosis.alarms == (), str(diagnosis)
    assert not diagnosis.verdict.startswith("Not healthy")
    return True


def stale(posterior: credo.Posterior) -> credo.Posterior:
    """As after loading weights into a new network without its statistics."""
    for leaf in posterior.parts:
        for module in leaf.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
    return posterior


# -- classification -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "seed"), KINDS)
def test_kl_times_a_thousand(trained: Trained, examine: Examine, kind: str, seed: int) -> None:
    diagnosis = examine(trained("bbb", kind, seed, temperature=1000.0), kind)
    assert first(diagnosis) == ("prior-too-strong", "alarm", "temperature=1")
    assert "1,000 times the weight" in diagnosis.verdict


@pytest.mark.parametrize(("kind", "seed"), KINDS)
@pytest.mark.parametrize("changes", [{"init": 1.0}, {"init": 0.5, "prior": 1.0, "temperature": 1.0}], ids=str)
def test_std_init_huge(trained: Trained, examine: Examine, kind: str, seed: int, changes: dict[str, float]) -> None:
    name, severity, argument = first(examine(trained("bbb", kind, seed, **changes), kind))
    assert (name, severity) == ("noise-too-large", "alarm")
    assert argument is not None
    assert 0.005 <= float(argument.removeprefix("init={'std': ").removesuffix("}")) <= 0.1


@pytest.mark.parametrize(
    ("kind", "seed", "std"),
    [
        ("mlp", 0, 1e-7),
        ("mlp", 0, 1e-4),
        ("conv", 0, 1e-4),
        *(pytest.param("mlp", seed, 1e-4, marks=pytest.mark.grid) for seed in (1, 2)),
    ],
)
def test_std_init_tiny(trained: Trained, examine: Examine, kind: str, seed: int, std: float) -> None:
    diagnosis = examine(trained("bbb", kind, seed, init=std), kind)
    name, severity, argument = first(diagnosis)
    assert (name, severity) == ("no-uncertainty", "alarm")
    assert argument is not None
    assert 0.01 <= float(argument.removeprefix("init={'std': ").removesuffix("}")) <= 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_statistics_stale(trained: Trained, examine: Examine, seed: int) -> None:
    diagnosis = examine(stale(trained("bbb", "conv", seed, fresh=True)), "conv")
    assert first(diagnosis) == ("stale-statistics", "alarm", None)
    assert "credo.refresh_statistics(posterior, loader)" in diagnosis.findings[0].advice


@pytest.mark.parametrize("method", ["map", "dropout", "ensemble"])
def test_statistics_stale_in_other_methods(trained: Trained, examine: Examine, method: str) -> None:
    diagnosis = examine(stale(trained(method, "conv", fresh=True)), "conv")
    assert first(diagnosis) == ("stale-statistics", "alarm", None)
    call = "credo.refresh_statistics(part, loader)" if method == "ensemble" else "refresh_statistics(posterior, loader)"
    assert call in diagnosis.findings[0].advice


@pytest.mark.parametrize(("kind", "seed"), KINDS)
@pytest.mark.parametrize(("size", "words"), [(23, "the number of batches"), (100_000, "times too little")])
def test_data_size_wrong(trained: Trained, examine: Examine, kind: str, seed: int, size: int, words: str) -> None:
    diagnosis = examine(trained("bbb", kind, seed, data_size=size), kind)
    assert first(diagnosis) == ("data-size", "alarm", "data_size=1438")
    assert words in diagnosis.findings[0].text


@pytest.mark.parametrize(("kind", "seed"), KINDS)
def test_healthy(trained: Trained, examine: Examine, kind: str, seed: int) -> None:
    assert no_alarm(examine(trained("bbb", kind, seed), kind, baseline=trained("map", kind, seed)))


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"noise": "lrt"},
        {"temperature": 1.0},
        {"init": 0.1},
        {"random": "last"},
        {"prior": credo.priors.ScaleMixture()},
        {"prior": credo.priors.Laplace(b=0.2)},
        {"lr": 1e-3, "prior": 1.0, "temperature": 1.0, "epochs": 20},
    ],
    ids=str,
)
def test_healthy_variants(trained: Trained, examine: Examine, changes: dict[str, Any]) -> None:
    assert no_alarm(examine(trained("bbb", "mlp", **changes)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["map", "dropout", "ensemble", "ensemble-bbb"])
def test_healthy_methods(trained: Trained, examine: Examine, method: str, seed: int) -> None:
    assert no_alarm(examine(trained(method, "mlp", seed)))


@pytest.mark.parametrize("method", ["map", "dropout", "ensemble"])
def test_healthy_methods_with_statistics(trained: Trained, examine: Examine, method: str) -> None:
    assert no_alarm(examine(trained(method, "conv"), "conv"))


def test_worse_than_the_baseline(trained: Trained, examine: Examine) -> None:
    """At temperature 1 nine thousand nats of KL stand against 1,438 examples: it underfits, and says why."""
    diagnosis = examine(trained("bbb", "mlp", temperature=1.0), baseline=trained("map", "mlp"))
    name, severity, argument = first(diagnosis)
    assert (name, severity, argument) == ("worse-than-baseline", "warning", "temperature=0.1")
    scores = diagnosis.measurements["scores"]
    assert scores["ensemble"]["nll"] > scores["baseline"]["nll"] + 0.05


# -- natural gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name", "argument"),
    [
        ({"temperature": 1000.0}, "prior-too-strong", "temperature=1"),
        ({"curvature": {"init": 1e-3}, "prior_precision": 1.0}, "noise-too-large", "curvature={'init': "),
        ({"curvature": {"init": 1e8}}, "no-uncertainty", "curvature={'init': "),
        ({"data_size": 23}, "data-size", "data_size=1438"),
    ],
    ids=str,
)
def test_ivon(trained: Trained, examine: Examine, changes: dict[str, Any], name: str, argument: str) -> None:
    found = first(examine(trained("ivon", "mlp", **changes)))
    assert found[:2] == (name, "alarm")
    assert (found[2] or "").startswith(argument)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_healthy_ivon(trained: Trained, examine: Examine, kind: str) -> None:
    assert no_alarm(examine(trained("ivon", kind), kind))


def test_vogn(trained: Trained, examine: Examine) -> None:
    assert no_alarm(examine(trained("vogn", "mlp")))
    assert first(examine(trained("vogn", "mlp", temperature=1000.0)))[0] == "prior-too-strong"
    assert first(examine(trained("vogn", "mlp", data_size=23)))[0] == "data-size"
    name, severity, argument = first(examine(trained("vogn", "mlp", curvature={"init": 1e8})))
    assert (name, severity) == ("no-uncertainty", "alarm")
    assert 0.01 <= float((argument or "").removeprefix("curvature={'init': ").removesuffix("}")) <= 10
    augmented = examine(trained("vogn", "mlp", temperature=0.1))
    assert augmented.measurements["objective"]["effective_temperature"] == pytest.approx(0.1)
    assert no_alarm(examine(trained("ogn", "mlp")))
    assert first(examine(trained("ogn", "mlp", data_size=23)))[0] == "data-size"


# -- training that failed for other reasons -------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["mlp", "curve"])
def test_a_tiny_learning_rate(trained: Trained, examine: Examine, kind: str, seed: int) -> None:
    diagnosis = examine(trained("bbb", kind, seed, lr=1e-5, epochs=3), kind)
    assert first(diagnosis) == ("not-learned", "alarm", "lr=0.015")
    assert "training has not finished" in diagnosis.verdict


def test_a_huge_learning_rate(trained: Trained, examine: Examine) -> None:
    for kind in ("mlp", "curve"):
        name, severity, _ = first(
            examine(trained("map", kind, lr=3.0, optimizer={"name": "sgd", "clip_norm": 1.0}), kind)
        )
        assert name in ("not-learned", "worse-than-constant")
        assert severity == "alarm"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_diverged_network_is_not_advised_to_expect_its_errors(seed: int) -> None:
    """IVON without a clip and with a small fixed noise: predictions are off by thousands, no noise cures that."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(100, 1, generator=generator) * 2 - 1
    batches = [(x, torch.sin(3 * x))]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    unsafe = {"lr": 0.1, "clip": None, "temperature": 1.0, "prior": 1.0, "curvature": 0.9999}
    posterior = credo.IVON(model, data_size=100, likelihood=credo.GaussianNoise(0.1), seed=seed, **unsafe)
    with pytest.warns(credo.DivergenceWarning):
        credo.fit(posterior, batches, epochs=60, schedule="constant", progress=False)
    diagnosis = credo.diagnose(posterior, batches)
    finding = diagnosis.findings[0]
    assert (finding.name, finding.severity, finding.argument) == ("worse-than-constant", "alarm", "clip=0.01")
    assert "It is worse than a constant prediction on training data: rmse" in diagnosis.verdict
    assert not any("GaussianNoise" in (found.argument or "") for found in diagnosis.findings)


# -- regression -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["bbb", "map", "dropout", "ensemble"])
def test_healthy_regression(trained: Trained, examine: Examine, method: str, seed: int) -> None:
    assert no_alarm(examine(trained(method, "curve", seed), "curve"))


@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_regression_with_the_right_noise(trained: Trained, examine: Examine, seed: int) -> None:
    assert no_alarm(examine(trained("bbb", "curve", seed, likelihood=credo.GaussianNoise(0.3)), "curve"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "name", "argument"),
    [
        ({"temperature": 1000.0}, "prior-too-strong", "temperature=1"),
        ({"init": 1.5}, "noise-too-large", "init={'std': "),
        ({"init": 1e-8}, "no-uncertainty", "init={'std': "),
        ({"data_size": 10}, "data-size", "data_size=300"),
        ({"likelihood": credo.GaussianNoise(2.0)}, "noise-level", "likelihood=credo.GaussianNoise(std=0."),
        ({"likelihood": credo.GaussianNoise(0.02)}, "noise-level", "likelihood=credo.GaussianNoise(std=0."),
    ],
    ids=str,
)
def test_broken_regression(
    trained: Trained, examine: Examine, seed: int, changes: dict[str, Any], name: str, argument: str
) -> None:
    found = first(examine(trained("bbb", "curve", seed, **changes), "curve"))
    assert found[:2] == (name, "alarm")
    assert (found[2] or "").startswith(argument)


# -- the advice -----------------------------------------------------------------------------------------------


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mlp", {"temperature": 1000.0}),
        ("mlp", {"init": 1.0}),
        ("mlp", {"init": 0.5, "prior": 1.0, "temperature": 1.0}),
        ("mlp", {"init": 1e-7}),
        ("mlp", {"data_size": 23}),
        ("curve", {"init": 1.5}),
        ("curve", {"init": 1e-8}),
        ("curve", {"data_size": 10}),
    ],
    ids=str,
)
def test_following_the_advice_cures(trained: Trained, examine: Examine, kind: str, changes: dict[str, Any]) -> None:
    broken = examine(trained("bbb", kind, **changes), kind)
    arguments = broken.findings[0].arguments
    (key,) = arguments
    assert key in changes
    cured = trained("bbb", kind, **{**changes, **arguments})
    diagnosis = examine(cured, kind)
    assert no_alarm(diagnosis)
    before, after = (d.measurements["scores"]["ensemble"]["nll"] for d in (broken, diagnosis))
    assert after < before or key == "init"  # too small a σ costs no NLL


def test_refreshing_as_advised_gives_what_was_promised(trained: Trained, examine: Examine, loaders: Any) -> None:
    posterior = stale(trained("bbb", "conv", fresh=True))
    broken = examine(posterior, "conv")
    promised = broken.measurements["statistics"]["refreshed"]
    posterior.eval()
    credo.refresh_statistics(posterior, loaders("conv")[0])
    cured = examine(posterior, "conv")
    assert no_alarm(cured)
    scores = cured.measurements["scores"]["ensemble"]
    # Promised from 1,000 of the 1,438 examples and other draws.
    assert scores["accuracy"] == pytest.approx(promised["accuracy"], abs=0.02)
    assert scores["nll"] == pytest.approx(promised["nll"], abs=0.05)
    assert scores["nll"] < broken.measurements["scores"]["ensemble"]["nll"] - 0.1
