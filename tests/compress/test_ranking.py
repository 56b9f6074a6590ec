"""Ranking against a loop over all weights."""

import math
from typing import Any

import pytest
import torch

import credo
from credo.compress import choose_masks, prune, signal_to_noise, weight_scores
from credo.compress.ranking import keep_above, keep_highest, unit_norms


def scores_by_loop(posterior: credo.GaussianPosterior, by: str) -> list[tuple[float, str, int]]:
    """(score, parameter, place) of every weight, one after the other."""
    mean, std = posterior.mean(), posterior.std()
    return [
        (abs(m) / s if by == "snr" else abs(m), name, place)
        for name in mean
        if name.endswith("weight") and mean[name].dim() > 1
        for place, (m, s) in enumerate(zip(mean[name].flatten().tolist(), std[name].flatten().tolist(), strict=True))
    ]


@pytest.mark.parametrize("by", ["snr", "magnitude"])
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("kind", ["bbb", "vogn", "ivon"])
def test_masks_are_those_of_a_loop(kit: Any, kind: str, scope: str, by: str) -> None:
    posterior = kit.trained(kit.KINDS[kind])
    everything = scores_by_loop(posterior, by)
    names = dict.fromkeys(name for _, name, _ in everything)
    groups = [everything] if scope == "global" else [[e for e in everything if e[1] == name] for name in names]
    gone = {(name, place) for group in groups for _, name, place in sorted(group)[: round(0.6 * len(group))]}
    masks = choose_masks(posterior, rate=0.6, by=by, scope=scope)
    assert list(masks) == list(names)
    assert {(name, int(place)) for name, mask in masks.items() for place in (~mask).flatten().nonzero()} == gone


def test_threshold_is_that_of_a_loop(kit: Any) -> None:
    posterior = kit.trained(kit.KINDS["bbb"])
    gone = {(name, place) for score, name, place in scores_by_loop(posterior, "magnitude") if score < 0.05}
    masks = choose_masks(posterior, by="magnitude", threshold=0.05)
    assert {(name, int(place)) for name, mask in masks.items() for place in (~mask).flatten().nonzero()} == gone
    assert 0 < len(gone) < sum(mask.numel() for mask in masks.values())


def test_signal_to_noise_has_values_for_zeros() -> None:
    ratio = signal_to_noise(torch.tensor([2.0, -3.0, 0.0, 0.0, 1.0]), torch.tensor([4.0, 1.0, 1.0, 0.0, 0.0]))
    assert ratio.tolist() == [0.5, 3.0, 0.0, 0.0, math.inf]


def test_equal_scores_still_give_the_exact_number() -> None:
    masks = keep_highest({"a": torch.ones(7), "b": torch.ones(3, 1)}, 0.5)
    assert masks["a"].tolist() == [False] * 5 + [True] * 2
    assert masks["b"].all()
    assert keep_highest({"a": torch.ones(4)}, 0.0)["a"].all()


def test_unit_norms_are_root_mean_squares() -> None:
    norms = unit_norms([torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0.0, 6.0])])
    torch.testing.assert_close(norms, torch.tensor([(25 / 3) ** 0.5, 12**0.5]))


def test_parameters_are_chosen_as_random_ones_are(kit: Any) -> None:
    posterior = kit.trained(kit.KINDS["bbb"])
    assert list(weight_scores(posterior, parameters=["fc*"])) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    masks = prune(posterior, parameters="fc2.*", rate=0.5)
    assert all(mask.all() for name, mask in masks.items() if not name.startswith("fc2"))
    assert int((~torch.cat([masks["fc2.weight"].flatten(), masks["fc2.bias"]])).sum()) == 26


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 1.0}, "from 0 to below 1"),
        ({"rate": -0.1}, "from 0 to below 1"),
        ({"by": "snrs"}, "'snr'"),
        ({"scope": "layers"}, "'layer'"),
        ({"structure": "unit"}, "'units'"),
        ({"threshold": 1e9}, "would prune everything"),
        ({"threshold": -1.0}, "not be negative"),
        ({"parameters": "bn*"}, "none of the random ones"),
    ],
)
def test_wrong_wishes_are_refused_and_nothing_changes(kit: Any, options: dict[str, object], words: str) -> None:
    posterior = kit.trained(kit.KINDS["bbb"])
    before = [p.clone() for p in posterior.parameters()]
    with pytest.raises(ValueError, match=words):
        prune(posterior, **options)  # type: ignore[arg-type]
    assert posterior.kept is None
    assert all(torch.equal(a, b) for a, b in zip(before, posterior.parameters(), strict=True))


def test_without_noise_there_is_no_signal_to_noise(kit: Any) -> None:
    with pytest.raises(ValueError, match="by='magnitude'"):
        prune(kit.trained(kit.KINDS["map"]))
    with pytest.raises(ValueError, match="train a step first"):
        prune(kit.trained(kit.KINDS["vogn"], steps=0))


def test_thresholds_keep_what_reaches_them() -> None:
    assert keep_above({"a": torch.tensor([0.1, 0.2, 0.3])}, 0.2)["a"].tolist() == [False, True, True]
