"""Scores, thresholds and sets against torchcp and MAPIE on the same predictions, in the benchmarks' environment."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from peer_parts import peer_part
from torch import Tensor

import credo
from credo.evaluate.guarantees.raps import rows_to_choose

ROWS = 1500
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def class_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A network that is mostly right and less sure than it may be, so that a penalty pays."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(ROWS, 10, generator=generator)
    y = torch.multinomial((2 * logits).softmax(-1), 1, generator=generator).squeeze(1)
    return logits.double().softmax(-1), y


def value_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(ROWS, generator=generator).double()
    std = 0.1 + torch.rand(ROWS, generator=generator).double()
    return mean, std, mean + std * torch.randn(ROWS, generator=generator)


def quantile_of(scores: Tensor, alpha: float = 0.1) -> float:
    return float(scores.sort().values[math.ceil((len(scores) + 1) * (1 - alpha)) - 1])


@pytest.mark.parametrize("given", ["lac", "aps", "raps", "raps with a chosen penalty"])
def test_scores_thresholds_and_sets_are_those_of_torchcp(given: str) -> None:
    peer = peer_part("torchcp.classification.score")
    probs, y = class_rows()
    kind, used = given.split()[0], torch.ones(ROWS, dtype=torch.bool)
    fixed: dict[str, Any] = {"penalty": 0.1, "k_reg": 1} if given == "raps" else {}
    found = credo.conformal(probs, y, 0.1, kind, randomised=False, **fixed)
    assert isinstance(found, credo.ConformalSets)
    if "chosen" in given:
        assert found.penalty > 0
        used[rows_to_choose([torch.arange(ROWS)], 0.1)] = False
    options: dict[str, Any] = {
        "lac": {},
        "aps": {"randomized": False},
        "raps": {"randomized": False, "penalty": found.penalty, "kreg": found.k_reg},
    }[kind]
    score = getattr(peer, kind.upper())(score_type="identity", **options)
    assert torch.allclose(found.scores(probs), score(probs), **CLOSE)
    cut = quantile_of(score(probs[used], y[used]))
    assert found.thresholds[0] == pytest.approx(cut, abs=1e-6)
    sure = (score(probs) - cut).abs().amin(1) > 1e-6
    new = (score(probs) <= cut) | (probs == probs.amax(1, keepdim=True))
    assert torch.equal(found.sets(probs)[sure], new[sure])


@pytest.mark.parametrize("kind", ["aps", "raps"])
def test_randomised_scores_are_those_of_torchcp_with_the_same_numbers(kind: str) -> None:
    peer = peer_part("torchcp.classification.score")
    probs, y = class_rows()
    fixed: dict[str, Any] = {"penalty": 0.2, "k_reg": 2} if kind == "raps" else {}
    theirs = {"penalty": 0.2, "kreg": 2} if kind == "raps" else {}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        wanted = getattr(peer, kind.upper())(score_type="identity", randomized=True, **theirs)(probs, y)
        torch.manual_seed(3)
        drawn = torch.rand(ROWS)
    found = credo.conformal(probs, y, 0.1, kind, **fixed)
    assert isinstance(found, credo.ConformalSets)
    # They take u of the class's own probability away, we add it.
    assert torch.allclose(found.scores(probs, 1 - drawn.double()).gather(1, y[:, None])[:, 0], wanted, **CLOSE)


def test_penalty_zero_of_torchcp_is_aps_and_ours_is_refused() -> None:
    peer = peer_part("torchcp.classification.score")
    probs, y = class_rows()
    theirs = peer.RAPS(score_type="identity", randomized=False)  # its defaults
    assert torch.equal(theirs(probs), peer.APS(score_type="identity", randomized=False)(probs))
    with pytest.raises(ValueError, match="is APS"):
        credo.conformal(probs, y, 0.1, "raps", penalty=0.0)


def test_intervals_are_those_of_torchcp() -> None:
    peer = peer_part("torchcp.regression.score")
    mean, std, y = value_rows()
    split = quantile_of(peer.ABS()(mean[:, None], y)[:, 0])
    assert credo.conformal(mean, y, 0.1, "split").thresholds[0] == pytest.approx(split, abs=1e-6)
    ends = torch.stack([mean - 0.5 * std, mean + 2 * std], -1)
    cqr = quantile_of(peer.CQR()(ends, y).flatten())
    assert credo.conformal((ends[:, 0], ends[:, 1]), y, 0.1, "cqr").thresholds[0] == pytest.approx(cqr, abs=1e-6)


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_scores_of_sets_are_those_of_mapie(kind: str) -> None:
    made = getattr(peer_part(f"mapie.conformity_scores.sets.{kind}"), f"{kind.upper()}ConformityScore")()
    probs, y = class_rows()
    made.set_external_attributes(classes=np.arange(10), random_state=0)
    theirs = made.get_conformity_scores(y.numpy(), probs.numpy(), y_enc=y.numpy())
    found = credo.conformal(probs, y, 0.1, kind)
    assert isinstance(found, credo.ConformalSets)
    u = torch.from_numpy(np.random.RandomState(0).uniform(size=ROWS))  # as the package draws them
    ours = found.scores(probs, 1 - u).gather(1, y[:, None]).squeeze(1)
    assert torch.allclose(ours, torch.from_numpy(np.asarray(theirs).reshape(-1)), **CLOSE)


def test_scores_of_normalised_intervals_are_those_of_mapie() -> None:
    score = peer_part("mapie.conformity_scores.bounds.std_normalised").StdConformityScore()
    mean, std, y = value_rows()
    theirs = torch.from_numpy(score.get_signed_conformity_scores(y.numpy(), mean.numpy(), std.numpy())).abs()
    found = credo.conformal((mean, std), y, 0.1, "normalised")
    assert found.thresholds[0] == pytest.approx(quantile_of(theirs), abs=1e-6)


@pytest.mark.parametrize("confidence", [None, 0.9])
@pytest.mark.parametrize("classes", [None, 1])
def test_risk_control_is_that_of_mapie(confidence: float | None, classes: int | None) -> None:
    """The largest of all thresholds that pass its test, by its own risk."""
    peer = peer_part("mapie.risk_control.methods")
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 4, generator=generator)
    y = torch.rand(200, 4, generator=generator) < logits.sigmoid()
    y[:, 1] |= ~y.any(1)  # every row has a label
    probs = (0.6 * logits + 0.5).double().sigmoid()
    found = credo.conformal(probs, y, 0.1, "fnr", confidence=confidence, classes=classes)
    own = slice(None) if classes is None else slice(classes, classes + 1)
    rows = y[:, own].any(1)
    probs, y = probs[rows][:, own], y[rows][:, own]
    tried = probs[y].sort().values
    missed = (((probs[None] < tried[:, None, None]) & y).sum(-1) / y.sum(-1)).double().numpy()
    if confidence is None:
        passes = peer.get_r_hat_plus(missed.T, tried.numpy(), "crc", None, None, None)[1] <= 0.1
    else:
        binary = classes is not None
        passes = peer.compute_hoeffding_bentkus_p_value(missed.mean(1), len(y), 0.1, binary)[:, 0] <= 0.1
    assert found.thresholds[0] == pytest.approx(float(tried[passes].max()), abs=1e-6)
