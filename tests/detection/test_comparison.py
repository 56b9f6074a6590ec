"""Intervals of AUROC and FPR95 against resampling with the metrics themselves."""

import pytest
import torch
from torch import Tensor

from credo.detection import comparison
from credo.detection.comparison import compare_scores
from credo.evaluate import auroc, fpr_at

GENERATOR = torch.Generator().manual_seed(0)


def groups(n: int = 60, m: int = 40) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inside, outside = torch.randn(n, generator=GENERATOR), torch.randn(m, generator=GENERATOR) + 1
    noise = torch.randn(n + m, generator=GENERATOR)
    worse = {"inside": inside + 2 * noise[:n], "outside": outside + 2 * noise[n:]}
    return (
        {"good": inside, "tied": inside.round(), "worse": worse["inside"]},
        {"good": outside, "tied": outside.round(), "worse": worse["outside"]},
    )


def test_every_resample_has_the_value_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_BLOCK", 500)  # several blocks
    inside, outside = groups()
    found = comparison._resampled(inside, outside, 12, 3)
    rows = [pair for n, m in comparison._counts(60, 40, 12, 3) for pair in zip(n.long(), m.long(), strict=True)]
    assert len(rows) == 12
    for index, (n, m) in enumerate(rows):
        assert int(n.sum()) == 60
        assert int(m.sum()) == 40
        for name in inside:
            negative, positive = inside[name].repeat_interleave(n), outside[name].repeat_interleave(m)
            assert float(found[name][0][index]) == pytest.approx(auroc(positive, negative), abs=1e-12)
            assert float(found[name][1][index]) == pytest.approx(fpr_at(positive, negative), abs=1e-12)


def test_differences_are_paired() -> None:
    inside, outside = groups(400, 300)
    found = compare_scores(inside, outside, resamples=300)
    assert found.reference == "good"
    assert list(found.auroc_gain) == list(found.fpr95_gain) == ["tied", "worse"]
    assert found.auroc["good"].value == auroc(outside["good"], inside["good"])
    assert found.fpr95["worse"].value == fpr_at(outside["worse"], inside["worse"])
    gain = found.auroc_gain["worse"]
    assert gain.value == pytest.approx(found.auroc["worse"].value - found.auroc["good"].value)
    assert gain.low < gain.value < gain.high < 0
    tied = found.auroc_gain["tied"]  # nearly the same score: far narrower than the score's own interval
    assert tied.high - tied.low < 0.5 * (found.auroc["tied"].high - found.auroc["tied"].low)
    back = compare_scores(inside, outside, reference="worse", resamples=300)
    assert set(back.better) == {"good", "tied"}
    assert found.better == []
    assert set(found.to_dict()) == {"reference", "auroc", "fpr95", "auroc_gain", "fpr95_gain"}


def test_intervals_cover() -> None:
    """Of 200 intervals of 90 %, 160 to 196 must cover: outside of that in about 1e-5 of all correct programs."""
    true = float(torch.distributions.Normal(0, 2**0.5).cdf(torch.tensor(1.0)))
    generator, covered = torch.Generator().manual_seed(1), 0
    for seed in range(200):
        inside, outside = torch.randn(80, generator=generator), torch.randn(80, generator=generator) + 1
        found = compare_scores({"s": inside}, {"s": outside}, level=0.9, resamples=200, seed=seed).auroc["s"]
        covered += found.low <= true <= found.high
    assert 160 <= covered <= 196


def test_refusals() -> None:
    a, b = torch.rand(4), torch.rand(5)
    with pytest.raises(ValueError, match="same"):
        compare_scores({"x": a}, {"y": b})
    with pytest.raises(ValueError, match="at least one"):
        compare_scores({}, {})
    with pytest.raises(ValueError, match="different numbers"):
        compare_scores({"x": a, "y": b}, {"x": a, "y": a})
    with pytest.raises(ValueError, match="Unknown score 'z'"):
        compare_scores({"x": a}, {"x": b}, reference="z")
    with pytest.raises(ValueError, match="NaN"):
        compare_scores({"x": a * torch.nan}, {"x": b})
