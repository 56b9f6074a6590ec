"""Evidence and held-out data about the prior of a Laplace approximation."""

import dataclasses
from typing import Any

import pytest
import torch
from doctor_measurements import HEALTHY, interval, named
from torch import Tensor, nn

import credo
from credo.doctor.measure.prior_scales import FACTORS, PriorScales

FOUND = PriorScales([-90.0, -50.0, -40.0, -60.0, -99.0], [0.5, 0.3, 0.2, 0.1, 0.15], 1.0, 10.0, interval(0.1), 2.0)


def finding(**changes: Any) -> credo.Finding | None:
    scales = dataclasses.replace(FOUND, **changes)
    method = dataclasses.replace(HEALTHY.method, arguments=HEALTHY.method.arguments | {"prior"})
    return named(dataclasses.replace(HEALTHY, prior_scales=scales, method=method), "prior-disagreement")


def test_a_prior_that_held_out_rows_do_not_like_is_named_with_a_better_one() -> None:
    found = finding()
    assert found is not None
    assert found.severity == "warning"
    assert "10 times has the lowest held-out NLL, 0.100, and 20 nats less evidence than 1 times" in found.text
    assert found.arguments == {"prior": 0.63}  # 2/√10
    several = finding(std=None)
    assert several is not None
    assert not several.arguments


def test_it_is_a_note_where_the_present_prior_is_the_best_on_held_out_rows() -> None:
    found = finding(by_evidence=0.1, by_held_out=1.0)
    assert found is not None
    assert found.severity == "note"
    assert "keep the prior" in found.advice
    assert not found.arguments


@pytest.mark.parametrize(
    "changes", [{"by_held_out": 1.0}, {"gap": interval(0.005, 0.001)}, {"gap": interval(0.1, 0.2)}]
)
def test_agreement_and_differences_that_do_not_matter_are_no_finding(changes: dict[str, Any]) -> None:
    assert finding(**changes) is None


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def overtrained() -> credo.Laplace:
    """Separable classes, learned to certainty: the curvature vanishes, and the evidence chooses a wide prior."""
    torch.manual_seed(0)
    net, (x, y) = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2)), rows(60, 0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return credo.Laplace(net, data_size=60).fit([(x, y)])


def test_a_diagnosis_measures_it_and_leaves_the_posterior_as_it_is() -> None:
    posterior, held_out = overtrained(), [rows(200, 1)]
    config, evidence, std = posterior.config(), posterior.log_marginal_likelihood(), posterior.std()
    diagnosis = credo.diagnose(posterior, [rows(60, 0)], test=held_out, draws=4)
    assert (posterior.config(), posterior.log_marginal_likelihood()) == (config, evidence)
    torch.testing.assert_close(posterior.std(), std, rtol=0, atol=0)
    measured = diagnosis.measurements["prior_scales"]
    assert measured["by_evidence"] == 1.0
    for factor, found, nll in zip(FACTORS, measured["evidence"], measured["nll"], strict=True):
        own = credo.Laplace(posterior.model, data_size=60, prior=float(posterior.precision * factor) ** -0.5)
        own.fit([rows(60, 0)])
        assert found == pytest.approx(own.log_marginal_likelihood(), rel=1e-4)
        assert nll == pytest.approx(-float(credo.predict(own, held_out).log_likelihood.mean()), rel=1e-3)


def test_without_held_out_rows_or_evidence_there_is_nothing_to_compare() -> None:
    assert credo.diagnose(overtrained(), [rows(60, 0)], draws=4).measurements["prior_scales"] is None
    plain = credo.MAP(nn.Linear(4, 2), data_size=60)
    assert credo.diagnose(plain, [rows(60, 0)], test=[rows(20, 1)]).measurements["prior_scales"] is None


def test_what_held_out_rows_have_chosen_stays_and_is_not_asked_again() -> None:
    posterior = overtrained()
    credo.conformal(posterior, [rows(60, 2)], alpha=0.1)
    assert credo.diagnose(posterior, [rows(60, 0)], test=[rows(200, 1)]).measurements["prior_scales"] is not None
    credo.calibrate(posterior, [rows(100, 3)])
    credo.conformal(posterior, [rows(60, 4)], alpha=0.1)
    diagnosis = credo.diagnose(posterior, [rows(60, 0)], test=[rows(200, 1)])  # without a warning
    assert diagnosis.measurements["prior_scales"] is None
    assert posterior.calibration is not None
    assert posterior.conformal is not None
