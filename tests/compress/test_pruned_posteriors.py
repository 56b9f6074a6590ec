"""Pruned weights are exactly zero: in the mean, in draws, after more training, in files."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.compress import prune, sweep
from credo.models import build_model


def pruned(kit: Any, kind: str, rate: float = 0.75, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    posterior = kit.trained(kit.KINDS[kind])
    return posterior, prune(posterior, rate=rate, by=kit.criterion(posterior), **options)


def check_zeros(kit: Any, posterior: credo.Posterior, masks: dict[str, Tensor]) -> None:
    for weights in kit.weights_of(posterior):
        for name, mask in masks.items():
            assert not weights[name][~mask].any(), name
    if isinstance(posterior, credo.GaussianPosterior):
        for name, std in posterior.std().items():
            assert not std[~masks[name]].any()
            assert bool((std[masks[name]] > 0).all())


def test_pruned_weights_are_exactly_zero_and_stay_so(kit: Any, kind: str) -> None:
    posterior, masks = pruned(kit, kind)
    shares = [float((~mask).double().mean()) for mask in masks.values() if mask.dim() > 1]
    assert sum(shares) > 0
    check_zeros(kit, posterior, masks)
    before = kit.weights_of(posterior)[0]
    for _ in range(4):
        terms = posterior.step(kit.nll)
        assert math.isfinite(terms.loss)
        check_zeros(kit, posterior, masks)
    after = kit.weights_of(posterior)[0]
    assert all(bool((before[name] != after[name])[masks[name]].any()) for name in masks)


@pytest.mark.parametrize("kind", ["bbb", "bbb lrt", "vogn", "vogn by name", "ivon"])
def test_the_kept_weights_keep_their_distribution(kit: Any, kind: str) -> None:
    posterior = kit.trained(kit.KINDS[kind])
    mean, std = posterior.mean(), posterior.std()
    masks = prune(posterior, rate=0.5)
    for name in mean:
        assert torch.equal(posterior.mean()[name], mean[name] * masks[name])
        torch.testing.assert_close(posterior.std()[name], std[name] * masks[name], rtol=1e-5, atol=0)


def test_kl_is_that_of_the_kept_weights(kit: Any) -> None:
    """Also with a prior that differs by parameter."""
    posterior, masks = pruned(kit, "bbb by name")
    mean, std = posterior.mean(), posterior.std()
    kl = 0.0
    for name, mask in masks.items():
        if name in mean:
            p = torch.distributions.Normal(0.1, 2.0 if name.endswith("bias") else 0.5)
            q = torch.distributions.Normal(mean[name][mask], std[name][mask])
            kl += float(torch.distributions.kl_divergence(q, p).sum())
    assert posterior.step(kit.nll).kl == pytest.approx(kl, rel=1e-4)
    vogn, masks = pruned(kit, "vogn by name")
    mean, std = vogn.mean(), vogn.std()
    kl = 0.0
    for name, mean_of in mean.items():
        p = torch.distributions.Normal(0.0, 1.0 if name.endswith("bias") else 0.5)
        q = torch.distributions.Normal(mean_of[masks[name]], std[name][masks[name]])
        kl += float(torch.distributions.kl_divergence(q, p).sum())
    assert vogn.step(kit.nll).kl == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("kind", ["bbb", "vogn", "ivon"])
def test_training_is_that_of_a_posterior_without_these_weights(kit: Any, kind: str) -> None:
    """All weights of a unit's inputs pruned is the same as a kit.network that never had that input."""
    make = {
        "bbb": lambda net: credo.BBB(net, data_size=20, lr=1e-2, init=1e-6),
        "vogn": lambda net: credo.VOGN(net, data_size=20, lr=1e-2, temperature=1e-9),
        "ivon": lambda net: credo.IVON(
            net, data_size=20, lr=0.05, temperature=1e-9, curvature={"estimator": "squares"}
        ),
    }[kind]
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(2)), kit.Y[:20]

    def loss(inputs: Tensor) -> Any:
        return lambda net: nn.functional.cross_entropy(net(inputs), y)

    wide, narrow = nn.Linear(3, 4), nn.Linear(2, 4)
    with torch.no_grad():
        narrow.weight.copy_(wide.weight[:, :2])
        narrow.bias.copy_(wide.bias)
    first, second = make(wide), make(narrow)
    first.keep_({"weight": torch.tensor([True, True, False]).expand(4, 3)})
    for _ in range(5):
        first.step(loss(x))
        second.step(loss(x[:, :2]))
    torch.testing.assert_close(wide.weight[:, :2], narrow.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wide.bias, narrow.bias, rtol=1e-4, atol=1e-5)


def test_pruning_again_adds_to_what_was_pruned(kit: Any) -> None:
    for kind in ("map", "bbb", "vogn", "ivon"):
        posterior, first = pruned(kit, kind, 0.5)
        posterior.step(kit.nll)
        second = prune(posterior, rate=0.8, by=kit.criterion(posterior))
        total = [mask for mask in second.values() if mask.dim() > 1]
        assert sum(int((~m).sum()) for m in total) == round(0.8 * sum(m.numel() for m in total))
        assert not any(bool((second[name] & ~first[name]).any()) for name in first)
        posterior.step(kit.nll)
        check_zeros(kit, posterior, second)


def test_state_goes_into_a_new_posterior_and_training_goes_on_the_same(kit: Any, kind: str) -> None:
    posterior, masks = pruned(kit, kind)
    posterior.step(kit.nll)
    other = kit.KINDS[kind](kit.network(seed=5))
    other.load_state_dict(copy.deepcopy(posterior.state_dict()))
    assert posterior.step(kit.nll) == other.step(kit.nll)
    assert all(torch.equal(a, b) for a, b in zip(posterior.parameters(), other.parameters(), strict=True))
    check_zeros(kit, other, masks)
    otherwise, _ = pruned(kit, kind, 0.5)
    with pytest.raises(ValueError, match="different pruning mask"):
        otherwise.load_state_dict(posterior.state_dict())


def test_files_give_back_the_same_bits(kit: Any, kind: str, tmp_path: Path) -> None:
    posterior, masks = pruned(kit, kind)
    loaded = credo.load(credo.save(posterior, tmp_path / "p.safetensors"))
    mine, theirs = posterior.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(theirs[n], t) for n, t in mine.items() if isinstance(t, Tensor))
    assert loaded.config() == posterior.config()
    draws = [credo.predict(p, kit.X, draws=3, strategy="loop").probs for p in (posterior, loaded)]
    assert torch.equal(*draws)
    loaded.train()
    loaded.step(kit.nll)
    check_zeros(kit, loaded, masks)
    again = credo.load(credo.save(loaded, tmp_path / "q.safetensors"))
    check_zeros(kit, again, masks)


@pytest.mark.parametrize("method", [credo.BBB, credo.VOGN, credo.IVON])
def test_files_are_small(kit: Any, method: Any, tmp_path: Path) -> None:
    net = build_model("mlp", inputs=(1, 28, 28), classes=10, seed=0)
    posterior = method(net, data_size=40)
    x = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    posterior.step(lambda net: nn.functional.cross_entropy(net(x), kit.Y))
    whole = credo.save(posterior, tmp_path / "whole.safetensors").stat().st_size
    prune(posterior, rate=0.75)
    path = credo.save(posterior, tmp_path / "pruned.safetensors")
    assert path.stat().st_size <= 0.35 * whole
    assert credo.describe(path)["format"] == 2
    assert credo.describe(tmp_path / "whole.safetensors")["format"] == 1


def test_members_of_an_ensemble_are_pruned_one_by_one(kit: Any, tmp_path: Path) -> None:
    ensemble = credo.Ensemble([kit.trained(kit.KINDS["bbb"], kit.network(seed)) for seed in range(2)])
    with pytest.raises(credo.UnsupportedModelError, match="prune the parts"):
        prune(ensemble)
    masks = [prune(part, rate=0.5 + 0.2 * index) for index, part in enumerate(ensemble.parts)]
    loaded = credo.load(credo.save(ensemble, tmp_path / "e.safetensors"))
    for part, own in zip(loaded.parts, masks, strict=True):
        check_zeros(kit, part, own)


@pytest.mark.parametrize("method", [credo.NoisyKFAC, credo.KFAC, credo.OGN])
def test_what_cannot_be_pruned_says_so(kit: Any, method: Any) -> None:
    with pytest.raises(credo.UnsupportedModelError, match="independent of each other"):
        prune(kit.trained(lambda net: method(net, data_size=40)), by="magnitude")


def test_masks_that_do_not_fit_are_refused(kit: Any) -> None:
    posterior = kit.trained(kit.KINDS["bbb"])
    with pytest.raises(ValueError, match=r"fc2\.weight"):
        posterior.keep_({"fc2.weights": torch.ones(4, 12, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"must be \[4, 12\] of torch.bool"):
        posterior.keep_({"fc2.weight": torch.ones(4, 12)})
    assert posterior.kept is None


def test_a_sweep_is_pruning_at_each_rate_and_changes_nothing(kit: Any) -> None:
    posterior = kit.trained(kit.KINDS["bbb"], steps=20)
    before = copy.deepcopy({n: t for n, t in posterior.state_dict().items() if isinstance(t, Tensor)})
    points = sweep(posterior, [(kit.X, kit.Y)], (0.0, 0.5, 0.9), draws=4)
    assert all(torch.equal(t, posterior.state_dict()[n]) for n, t in before.items())
    for point in points:
        one = copy.deepcopy(posterior)
        masks = prune(one, rate=point.rate)
        prediction = credo.predict(one, [(kit.X, kit.Y)], draws=4)
        assert point.metrics["accuracy"] == float((prediction.labels == kit.Y).double().mean())
        assert point.kept == sum(int(mask.sum()) for mask in masks.values())
    with pytest.raises(ValueError, match="not an iterator"):
        sweep(posterior, iter([(kit.X, kit.Y)]))


@pytest.mark.parametrize("kind", ["bbb by name", "vogn by name", "ivon"])
def test_the_doctor_sees_only_what_is_left(kit: Any, kind: str) -> None:
    posterior, masks = pruned(kit, kind)
    found = credo.diagnose(posterior, [(kit.X, kit.Y)], draws=4).measurements
    assert found["weights"]["weights"] == sum(int(masks[name].sum()) for name in posterior.mean())
    assert found["objective"]["kl"] == pytest.approx(posterior.step(kit.nll).kl, rel=1e-4)
