"""SWAG on networks with BatchNorm: the mean and every fixed draw have running statistics of their own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.methods.swag import statistics

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).long()
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.second, self.other, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        return self.last(self.other(self.second(hidden)).tanh())


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network()


def make(seed: int = 0, **options: Any) -> credo.SWAG:
    options = {"lr": 0.05, "rank": 3, "batchnorm_draws": 4, "start": 2, "every": 2, **options}
    return credo.SWAG(network(seed), data_size=40, seed=seed, **options)


def fit(posterior: credo.Posterior, epochs: int = 3, **options: Any) -> Any:
    return credo.fit(posterior, BATCHES, epochs=epochs, progress=False, **options)


def statistics_by_hand(weights: dict[str, Tensor], batches: list[Any]) -> dict[str, Tensor]:
    """Averages over batches of the mean and the unbiased variance of what enters each norm."""
    net = network()
    net.load_state_dict({**net.state_dict(), **{n: w for n, w in weights.items() if "running" not in n}})
    net.train()
    net.drop.eval()
    seen: dict[str, list[Tensor]] = {"norm": [], "other": []}
    for name, entered in seen.items():
        net.get_submodule(name).register_forward_hook(lambda _, inputs, __, entered=entered: entered.append(inputs[0]))
    with torch.no_grad():
        for x, _ in batches:
            net(x)
    found = {f"{name}.running_mean": torch.stack([x.mean(0) for x in xs]).mean(0) for name, xs in seen.items()}
    return found | {f"{name}.running_var": torch.stack([x.var(0) for x in xs]).mean(0) for name, xs in seen.items()}


def test_every_draw_and_the_mean_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "ROWS", 16)  # the first and the third of five batches
    posterior = fit(make())
    draws = list(posterior.iter_draws(4))
    assert len({float(draw["norm.running_mean"].sum()) for draw in draws}) == 4
    for draw in draws:
        for name, wanted in statistics_by_hand(draw, [BATCHES[0], BATCHES[2]]).items():
            torch.testing.assert_close(draw[name], wanted)
    for name, wanted in statistics_by_hand(dict(posterior.model.named_parameters()), BATCHES).items():
        torch.testing.assert_close(posterior.model.get_buffer(name), wanted)


def test_the_draws_are_fixed() -> None:
    posterior = fit(make())
    sums = [float(draw["first.weight"].sum()) for draw in posterior.iter_draws(8)]
    assert sums[:4] == sums[4:]
    assert len(set(sums)) == 4
    assert {float(posterior.draw()["first.weight"].sum()) for _ in range(30)} == set(sums)
    some = credo.predict(posterior, X, draws=4, seed=0).probs
    torch.testing.assert_close(credo.predict(posterior, X, draws=4, seed=1).probs, some)


def test_without_fixed_draws_all_use_the_statistics_of_the_mean() -> None:
    posterior = fit(make(batchnorm_draws=0))
    draws = list(posterior.iter_draws(6))
    assert len({float(draw["first.weight"].sum()) for draw in draws}) == 6
    assert all(torch.equal(draw["norm.running_var"], posterior.model.norm.running_var) for draw in draws)


def test_until_the_end_of_training_it_is_the_network_as_it_is() -> None:
    seen = []

    def look(epoch: int, done: int, total: int, terms: credo.Terms) -> None:
        seen.append((posterior.collected, posterior.is_random, posterior.draw()))

    posterior = make()
    fit(posterior, on_step=look, validation=BATCHES)
    assert seen[-1] == (6, False, {})
    assert posterior.is_random
    posterior.collect_()
    assert not posterior.is_random


def test_training_continues_with_the_statistics_of_the_optimiser() -> None:
    whole, halves = make(collect_lr=1.0), make(collect_lr=1.0)
    for posterior in (whole, halves):
        posterior.model.drop.p = 0.0  # its masks depend on the number of the epoch
    fit(whole, 4, schedule="constant")
    for _ in range(2):
        fit(halves, 2, schedule="constant")
    ours, theirs = (posterior.get_extra_state()["iterate"] for posterior in (whole, halves))
    assert "norm.running_var" in ours
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert not torch.equal(tensor, whole.model.state_dict()[name]), name
    assert torch.equal(whole.statistics.means, halves.statistics.means)


def test_files_make_the_same_draws_again(tmp_path: Path) -> None:
    posterior = fit(make())
    loaded = credo.load(credo.save(posterior, tmp_path / "p.safetensors"), model=network(1), seed=99)
    ours, theirs = (sorted(float(d["first.weight"].sum()) for d in p.iter_draws(4)) for p in (posterior, loaded))
    assert ours == theirs
    assert torch.equal(credo.predict(loaded, X, draws=4).probs, credo.predict(posterior, X, draws=4).probs)


def test_a_pass_in_train_mode_changes_none_of_the_cached() -> None:
    posterior = fit(make()).train()
    before = copy.deepcopy(posterior.statistics.state_dict())
    for _ in range(4):
        posterior(X)
    assert all(torch.equal(before[name], value) for name, value in posterior.statistics.state_dict().items())


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 1.5])
def test_at_another_scale_of_the_noise_the_first_norm_is_nearly_exact(scale: float) -> None:
    posterior = fit(make())
    mean = posterior.model.norm
    with posterior.snapshot(seed=0) as frozen:
        frozen.noise_scale = scale
        draws = list(frozen.iter_draws(4))
    for draw in draws:
        wanted = statistics_by_hand(draw, BATCHES)
        torch.testing.assert_close(draw["norm.running_mean"], wanted["norm.running_mean"], rtol=1e-4, atol=1e-5)
        error = (draw["norm.running_var"] - wanted["norm.running_var"]).norm()
        assert error <= 1e-5 + 0.6 * (mean.running_var - wanted["norm.running_var"]).norm()


def test_a_loader_that_fails_leaves_all_as_it_was() -> None:
    posterior = make(every=1)
    for x, y in BATCHES:
        posterior.step(lambda net, x=x, y=y: nn.functional.cross_entropy(net(x), y))
    before = copy.deepcopy(posterior.state_dict())

    def broken() -> Any:
        yield BATCHES[0]
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        posterior.end_training_(broken())
    with pytest.raises(TypeError, match="must be a tensor"):
        posterior.end_training_([{"x": "text"}])
    for name, value in before.items():
        if isinstance(value, Tensor) and "seeds" not in name:
            assert torch.equal(posterior.state_dict()[name], value), name
    assert posterior.model.training


def test_predictions_of_an_own_loop_tell_that_statistics_are_missing() -> None:
    posterior = make()
    for _ in range(3):
        posterior.collect_()
    with pytest.warns(credo.CredoWarning, match=r"Call end_training_\(loader\)"):
        credo.predict(posterior, X)
    posterior.end_training_(BATCHES)
    credo.predict(posterior, X)


def test_several_processes_average_what_they_found() -> None:
    class Doubling:
        """As if another process had found zeros."""

        def average_(self, tensors: list[Tensor]) -> None:
            for tensor in tensors:
                tensor.mul_(0.5)

    alone, together = make(), make()
    for posterior in (alone, together):
        fit(posterior)
    with together.snapshot(copies="none") as private:
        private.eval()
        together.statistics.find_(private.model, BATCHES, together._weights, 0, Doubling())
    torch.testing.assert_close(together.statistics.means, alone.statistics.means / 2)


def test_members_of_an_ensemble_bring_their_statistics() -> None:
    both = fit(credo.Ensemble([make(seed) for seed in range(2)]))
    for index, draw in enumerate(both.iter_draws(8)):
        part = both.parts[index % 2]
        wanted = statistics_by_hand({n: draw[n] for n in dict(part.model.named_parameters())}, BATCHES)
        torch.testing.assert_close(draw["other.running_var"], wanted["other.running_var"])
