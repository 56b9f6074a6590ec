"""Ensembles: an equal mixture of their members."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.core.errors import NonFiniteError, UnsupportedModelError
from credo.methods import BBB, KFAC, MAP, Ensemble, MCDropout


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def point_members(count: int = 3, **options) -> list[MAP]:
    return [MAP(network(i), data_size=10, seed=i, **options) for i in range(count)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 3, generator=generator), torch.randint(2, (12,), generator=generator)


def test_draws_are_the_members_in_turn() -> None:
    members, x = point_members(), data()[0]
    for member in members:  # so that running statistics differ, too
        for _ in range(member.seed + 1):
            member.model(x * (member.seed + 1))
    ensemble = Ensemble(members).eval()
    outputs = []
    for draw in ensemble.iter_draws(7):
        with ensemble.sampled(draw) as net:
            outputs.append(net(x))
    expected = [member.model(x) for member in members]
    assert not torch.equal(expected[0], expected[1])
    for index, output in enumerate(outputs):
        torch.testing.assert_close(output, expected[index % 3])


def test_single_draws_choose_every_member_equally_often() -> None:
    ensemble = Ensemble(point_members())
    first = [member.model[0].weight for member in ensemble.parts]
    counts = torch.zeros(3)
    for _ in range(1200):
        weight = ensemble.draw()["0.weight"]
        counts[next(i for i, w in enumerate(first) if w is weight)] += 1
    # Binomial with 1 200 and 1/3: five standard deviations are 82; false alarms 2e-6.
    assert ((counts - 400).abs() < 82).all()


def test_a_draw_of_a_gaussian_member_comes_from_that_member() -> None:
    members = [BBB(network(i), data_size=10, seed=i, init=1e-6) for i in range(2)]
    for draw, member in zip(Ensemble(members).iter_draws(2), members, strict=True):
        for name, mean in member.mean().items():
            torch.testing.assert_close(draw[name], mean, rtol=0, atol=1e-5)
            assert not torch.equal(draw[name], mean)


def test_members_train_as_they_would_alone() -> None:
    x, y = data()
    together, alone = Ensemble(point_members(lr=0.1)), point_members(lr=0.1)
    for _ in range(3):
        terms = together.step(lambda net: F.cross_entropy(net(x), y))
        single = [member.step(lambda net: F.cross_entropy(net(x), y)) for member in alone]
        assert terms.loss == pytest.approx(sum(t.loss for t in single) / 3)
        assert terms.nll == pytest.approx(sum(t.nll for t in single) / 3)
        assert terms.kl is None
    for member, other in zip(together.parts, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(member.parameters(), other.parameters(), strict=True))


def test_the_kl_is_the_members_average_and_lr_scale_reaches_them() -> None:
    x, y = data()
    ensemble = Ensemble([BBB(network(i), data_size=10, seed=i, init=0.1 + i) for i in range(2)])
    expected = sum(member.kl().item() for member in ensemble.parts) / 2
    ensemble.lr_scale = 0.25
    terms = ensemble.step(lambda net: F.cross_entropy(net(x), y))
    assert terms.kl == pytest.approx(expected, rel=1e-6)
    assert [member.lr_scale for member in ensemble.parts] == [0.25, 0.25]


def test_an_ensemble_of_dropout_networks_is_noisy_in_every_member() -> None:
    x = data()[0]
    ensemble = Ensemble([MCDropout(network(i), data_size=10, rate=0.5, seed=i) for i in range(2)]).eval()
    for draw in ensemble.iter_draws(2):
        with ensemble.sampled(draw) as net:
            assert not torch.equal(net(x), net(x))


def test_its_network_and_likelihood_are_the_first_members_and_counted_once() -> None:
    members = point_members()
    ensemble = Ensemble(members)
    assert ensemble.model is members[0].model
    assert ensemble.likelihood is members[0].likelihood
    count = sum(p.numel() for p in network(0).parameters())
    assert sum(p.numel() for p in ensemble.parameters()) == 3 * count
    assert all(key.startswith(("members.", "_extra")) for key in ensemble.state_dict())


def test_seeded_reaches_the_members() -> None:
    ensemble = Ensemble([BBB(network(i), data_size=10, seed=i) for i in range(2)])
    states = [member.generator.get_state() for member in ensemble.parts]
    with ensemble.seeded(3):
        first = list(ensemble.iter_draws(2))
    assert all(torch.equal(m.generator.get_state(), s) for m, s in zip(ensemble.parts, states, strict=True))
    with ensemble.seeded(3):
        again = list(ensemble.iter_draws(2))
    assert all(torch.equal(a["0.weight"], b["0.weight"]) for a, b in zip(first, again, strict=True))
    # Members of one network under one seed must still draw apart.
    noise = [
        (d["0.weight"] - m.mean()["0.weight"]) / m.std()["0.weight"] for d, m in zip(first, ensemble.parts, strict=True)
    ]
    assert (noise[0] - noise[1]).abs().max() > 0.1


def test_bad_members_are_refused() -> None:
    shared = network(0)
    with pytest.raises(ValueError, match="at least one"):
        Ensemble([])
    with pytest.raises(ValueError, match="share one network"):
        Ensemble([MAP(shared, data_size=10), MAP(shared, data_size=10)])
    with pytest.raises(UnsupportedModelError, match="same architecture"):
        Ensemble([MAP(network(0), data_size=10), MAP(nn.Linear(3, 2), data_size=10)])
    with pytest.raises(UnsupportedModelError, match=r"one method, got \['BBB', 'MAP'\]"):
        Ensemble([MAP(network(0), data_size=10), BBB(network(1), data_size=10)])


def test_ensembles_of_one_size_are_the_mixture_of_all_their_members(tmp_path) -> None:
    members, x = [MAP(network(i), data_size=10, seed=i) for i in range(4)], 3 * data()[0]
    with torch.no_grad():
        expected = torch.stack([member.model.eval()(x).softmax(-1) for member in members]).mean(0)
    nested = Ensemble([Ensemble(members[:2]), Ensemble(members[2:])])
    for seed in range(3):
        prediction = credo.predict(nested, x, draws=100, seed=seed)
        torch.testing.assert_close(prediction.probs, expected, rtol=1e-5, atol=1e-6)
        assert prediction.draws_used.unique().tolist() == [4]
        assert float(prediction.mc_error.max()) == 0
    credo.save(nested, tmp_path / "nested.safetensors")
    loaded = credo.load(tmp_path / "nested.safetensors", model=network(9))
    assert len(loaded.parts) == 4
    torch.testing.assert_close(credo.predict(loaded, x).probs, expected, rtol=1e-5, atol=1e-6)


def test_nested_random_members_are_drawn_equally_often() -> None:
    members = [BBB(network(i), data_size=10, seed=i, init=1e-6) for i in range(4)]
    draws = list(Ensemble([Ensemble(members[:2]), Ensemble(members[2:])]).iter_draws(8))
    nearest = [min(range(4), key=lambda i: (d["0.weight"] - members[i].model[0].weight).abs().sum()) for d in draws]
    assert nearest == [0, 1, 2, 3] * 2


def test_a_nested_ensemble_trains_every_member_once() -> None:
    x, y = data()
    members = [MAP(network(i), data_size=10, seed=i) for i in range(4)]
    Ensemble([Ensemble(members[:2]), Ensemble(members[2:])]).step(lambda net: F.cross_entropy(net(x), y))
    assert [member.steps for member in members] == [1, 1, 1, 1]


def test_ensembles_of_several_sizes_are_no_equal_mixture() -> None:
    members = point_members(5)
    with pytest.raises(UnsupportedModelError, match=r"ensembles of 2 and 3 networks.*one list"):
        Ensemble([Ensemble(members[:2]), Ensemble(members[2:])])
    with pytest.raises(UnsupportedModelError, match=r"ensembles of 1 and 2 networks"):
        Ensemble([members[0], Ensemble(members[3:])])


def test_a_member_in_two_nested_ensembles_is_refused() -> None:
    inner = Ensemble(point_members(2))
    with pytest.raises(ValueError, match="share one network"):
        Ensemble([inner, inner])


def test_a_kronecker_update_that_overflows_is_no_step_of_any_member() -> None:
    options = {"lr": 0.1, "clip": None, "curvature": {"factor_every": 10}, "damping": 1e-6, "prior_precision": 1e-6}
    ensemble, (x, y) = Ensemble([KFAC(network(i), data_size=12, seed=i, **options) for i in range(2)]), data()
    ensemble.step(lambda net: F.cross_entropy(net(x), y))
    before = [{name: value.clone() for name, value in part.named_buffers()} for part in ensemble.parts]
    weights = [p.detach().clone() for p in ensemble.parameters()]
    ensemble.parts[1].model.spiked = True  # a finite loss, gradients so large that the step is not
    with pytest.raises(NonFiniteError, match=r"The step of .* is not finite at step 1"):
        ensemble.step(lambda net: F.cross_entropy(net(x), y) * (1e37 if hasattr(net, "spiked") else 1.0))
    assert all(map(torch.equal, ensemble.parameters(), weights))
    for part, old in zip(ensemble.parts, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in part.named_buffers())
    assert [part.steps for part in (ensemble, *ensemble.parts)] == [1, 1, 1]
