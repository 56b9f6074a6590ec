"""Two short trainings choose between a cold and a warm plan of an open temperature."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.data import Batches, Split
from credo.methods.planning import planned_temperature
from credo.training import plan as module
from credo.training.plan import FEWEST_EPOCHS, chosen, constant_loss
from credo.training.stopping import TrainingStopped

METHODS = ("bbb", "vogn", "noisy-kfac")
OTHERS = torch.linspace(0, 1, 50)


def network(inputs: int = 2, outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, outputs))


def loader(rows: int = 60) -> Batches:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, generator=generator)
    return Batches(Split(x, x[:, :1] + 0.5 * torch.randn(rows, 1, generator=generator)), batch_size=20)


def make(method: str, **options: Any) -> credo.Posterior:
    return credo.METHODS[method](network(), data_size=60, likelihood="gaussian", **options)


def train(posterior: credo.Posterior, epochs: int = FEWEST_EPOCHS, **options: Any) -> credo.Posterior:
    return credo.fit(posterior, options.pop("loader", None) or loader(), epochs=epochs, progress=False, **options)


def last(posterior: credo.Posterior) -> float:
    """The temperature that training ends at."""
    planned = posterior.planned["temperature"]
    return float(planned["to"] if isinstance(planned, dict) else planned)


def test_a_plan_is_chosen_if_it_is_better_beyond_chance() -> None:
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0))
    error = float(noise.std()) / math.sqrt(50)
    centred = noise - noise.mean()
    for shift, plan in ((-1.1, "cold"), (-0.9, None), (0.0, None), (0.4, None), (0.6, "warm"), (3.0, "warm")):
        assert chosen(OTHERS + centred + shift * error, OTHERS, 10.0) == plan
    assert chosen(OTHERS + 1, OTHERS, 1.51) is None, "the cold one is as good as a constant"
    assert chosen(OTHERS + 1, OTHERS, 1.4) == "warm", "it is worse: it learned noise"
    endless = torch.tensor([math.inf])
    assert (chosen(endless, OTHERS, 1.0), chosen(OTHERS, endless, 1.0)) == ("warm", "cold")
    assert chosen(endless, endless, 1.0) is None


def test_a_constant_prediction_has_the_loss_of_the_targets_own_distribution() -> None:
    y = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 3.0])
    normal = torch.distributions.Normal(y.mean(0), y.std(0, correction=0))
    assert constant_loss(y) == pytest.approx(-float(normal.log_prob(y).sum(1).mean()), rel=1e-5)
    assert constant_loss(torch.tensor([0, 0, 2, 0])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def planned_for(method: str, x: Tensor, y: Tensor, epochs: int) -> credo.Posterior:
    """Stopped after its first step."""
    posterior = credo.METHODS[method](network(x.shape[1]), data_size=len(x), likelihood="gaussian")
    with pytest.raises(TrainingStopped):
        train(posterior, epochs, loader=Batches(Split(x, y), batch_size=32), stop=lambda: posterior.steps == 1)
    return posterior


@pytest.mark.parametrize("method", METHODS)
def test_noise_makes_it_warm_and_a_sharp_function_cold(method: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(160, 12, generator=generator)
    noisy = planned_for(method, x, 0.5 * x[:, :1] + torch.randn(160, 1, generator=generator), 200)
    assert last(noisy) == (1.5 if method == "noisy-kfac" else 1.0)
    x = 3 * torch.rand(600, 2, generator=generator) - 1.5
    y = torch.sin(4 * x[:, :1] + 2 * x[:, 1:]) + 0.05 * torch.randn(600, 1, generator=generator)
    sharp = planned_for(method, x, y, 40)
    usual = planned_temperature("regression", 40)
    assert last(sharp) == (1.0 if method == "noisy-kfac" else usual)
    if method == "noisy-kfac":
        assert sharp.planned["temperature"]["start"] == 0.01


def test_the_choice_leaves_the_training_itself_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(module, "chosen", lambda cold, warm, constant: seen.extend([cold, warm]))
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        tried = train(make("bbb"))
        assert torch.equal(torch.get_rng_state(), before)
    assert [len(losses) for losses in seen] == [20, 20], "a third of the rows"
    usual = train(make("bbb"), try_temperatures=False)
    assert tried.planned == usual.planned
    assert tried.steps == usual.steps
    assert all(torch.equal(a, b) for a, b in zip(tried.parameters(), usual.parameters(), strict=True))


def test_where_no_temperature_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a short training was made")

    monkeypatch.setattr(module, "_tried", fail)
    train(make("bbb"), FEWEST_EPOCHS - 1)
    train(make("bbb", temperature=0.3))
    train(make("bbb"), try_temperatures=False)
    train(make("bbb"), nll=lambda net, batch: (net(batch[0]) - batch[1]).square().mean())
    train(make("bbb"), weights=lambda batch: torch.ones(len(batch[0])))
    train(make("map"))
    train(make("ivon"))
    train(credo.BBB(network(), data_size=60, likelihood=credo.GaussianNoise(heteroscedastic=False, std=0.5)), 1)
    train(credo.Ensemble([make("bbb"), make("bbb")]))
    with pytest.raises(AssertionError, match="a short training"):
        train(make("bbb"))


def test_a_loader_that_cannot_be_divided_has_the_usual_plan() -> None:
    posterior = train(make("bbb"), loader=[*loader()][:2])
    assert posterior.temperature == planned_temperature("regression", FEWEST_EPOCHS)


def test_a_training_that_was_stopped_keeps_its_plan(tmp_path: Path) -> None:
    whole = train(make("vogn"), checkpoint=tmp_path / "whole.pt")
    posterior = make("vogn")

    def stop() -> bool:
        return posterior.steps == 20

    with pytest.raises(TrainingStopped):
        train(posterior, checkpoint=tmp_path / "parts.pt", stop=stop)
    again = train(make("vogn"), checkpoint=tmp_path / "parts.pt")
    assert again.planned == whole.planned
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


def test_a_plan_whose_training_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    original = credo.BBB.plan_as_

    def broken(self: credo.BBB, plan: str, **options: Any) -> None:
        original(self, plan, **options)
        if plan == "cold":
            next(iter(self.model.parameters())).data.fill_(math.inf)

    monkeypatch.setattr(credo.BBB, "plan_as_", broken)
    assert last(train(make("bbb"))) == 1.0


@pytest.mark.parametrize("labels", ["of positions", "ignored"])
def test_labels_of_positions_and_labels_that_are_ignored_have_the_usual_plan(labels: str) -> None:
    x = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    y = (
        (x > 9).long()
        if labels == "of positions"
        else torch.where(torch.arange(40) % 3 == 0, -100, (x[:, 0] > 9).long())
    )
    pool = nn.Identity() if labels == "of positions" else nn.Flatten()
    width = 4 if labels == "of positions" else 24
    net = nn.Sequential(nn.Embedding(20, 4), pool, nn.Linear(width, 2))
    posterior = credo.BBB(net, data_size=40)
    credo.fit(posterior, list(zip(x.split(10), y.split(10), strict=True)), epochs=30, progress=False)
    assert posterior.steps == 120


def test_a_file_of_noisy_kfac_has_the_noise_at_the_end_of_a_rising_temperature(tmp_path: Path) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    rising = {"start": 0.01, "steps": 10, "to": 1.0}
    posterior = credo.NoisyKFAC(network(), data_size=40, temperature=rising)
    credo.fit(posterior, [(x, (x[:, 0] > 0).long())], epochs=20, progress=False)
    loaded = credo.load(credo.save(posterior, tmp_path / "noisy.safetensors"), model=network())
    assert isinstance(loaded, credo.NoisyKFAC)
    assert loaded.temperature == posterior.temperature == 1.0
    for name, std in posterior.std().items():
        torch.testing.assert_close(loaded.std()[name], std)


def test_rows_without_a_label_are_not_counted_in_a_loader() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.arange(60) < 20, (x[:, 0] > 0).long(), -100)
    loader = DataLoader(TensorDataset(x, y), batch_size=60)
    credo.fit(credo.BBB(nn.Linear(3, 2), data_size=20), loader, epochs=1, progress=False)  # no DataSizeWarning
