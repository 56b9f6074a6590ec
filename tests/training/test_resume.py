"""A killed run that goes on equals one that was never stopped, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import torch
from killed_runs import FLOATS, IMAGES, LABELS, SIZE, Killed, assert_equal, network, recorded
from torch import nn
from torch.utils.data import DataLoader

import credo
from credo.training import make_schedule

EPOCHS = 4
METHODS: dict[str, Callable[[], credo.Posterior]] = {
    **killed_runs.METHODS,
    "bbb lrt": lambda: credo.BBB(network(), data_size=SIZE, lr=0.05, noise="lrt"),
    "mc-dropout": lambda: credo.MCDropout(network(), data_size=SIZE, optimizer="sgd", lr=0.1),
    "swag": lambda: credo.SWAG(network(), data_size=SIZE, lr=0.05, rank=3, batchnorm_draws=2),
    "sghmc": lambda: credo.SGHMC(network(), data_size=SIZE, cycles=2, samples=3),
    "sgld": lambda: credo.SGLD(network(), data_size=SIZE, schedule="decay", burn_in=2, every=1, samples=4),
}
LOADERS: dict[str, Callable[[], Any]] = {
    **killed_runs.LOADERS,
    "loader": lambda: DataLoader(FLOATS, batch_size=6, shuffle=True),
    "loader with generator": lambda: DataLoader(
        FLOATS, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
}


def run(posterior: credo.Posterior, loader: Any, **options: Any) -> list[Any]:
    return recorded(posterior, loader, **{"epochs": EPOCHS, **options})[0]


@pytest.mark.part(10)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_uninterrupted(method: str, loader: str, tmp_path: Path) -> None:
    whole = METHODS[method]()
    expected = run(whole, LOADERS[loader]())
    torch.manual_seed(123)  # whatever the global generator does, the run does not depend on it
    with pytest.raises(Killed):
        run(METHODS[method](), LOADERS[loader](), checkpoint=tmp_path / "c.pt", kill_at=(3, 2))
    torch.rand(17)
    resumed = METHODS[method]()
    records = run(resumed, LOADERS[loader](), checkpoint=tmp_path / "c.pt")
    assert records == expected
    # Weights, running statistics, optimiser moments, step counts and generators.
    assert_equal(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("kill_at", [(1, 1), (1, 4), (2, 1), (4, 4)])
def test_killed_at_any_step(kill_at: tuple[int, int], tmp_path: Path) -> None:
    whole = METHODS["bbb"]()
    expected = run(whole, LOADERS["batches"]())
    with pytest.raises(Killed):
        run(METHODS["bbb"](), LOADERS["batches"](), checkpoint=tmp_path / "c.pt", kill_at=kill_at)
    resumed = METHODS["bbb"]()
    assert run(resumed, LOADERS["batches"](), checkpoint=tmp_path / "c.pt") == expected
    assert_equal(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("loader", LOADERS)
def test_the_same_objects_can_go_on(loader: str, tmp_path: Path) -> None:
    """As in a notebook: the posterior and the loader of the broken run are used again."""
    whole = METHODS["map"]()
    expected = run(whole, LOADERS[loader]())
    posterior, batches = METHODS["map"](), LOADERS[loader]()
    with pytest.raises(Killed):
        run(posterior, batches, checkpoint=tmp_path / "c.pt", kill_at=(3, 3))
    assert run(posterior, batches, checkpoint=tmp_path / "c.pt") == expected
    assert_equal(posterior.state_dict(), whole.state_dict())


def test_killed_twice_and_between_epochs(tmp_path: Path) -> None:
    whole = METHODS["bbb"]()
    expected = run(whole, LOADERS["loader"]())
    path = tmp_path / "c.pt"
    for record in credo.train(
        METHODS["bbb"](), LOADERS["loader"](), epochs=EPOCHS, schedule="cosine", seed=5, checkpoint=path
    ):
        if record.epoch == 1:
            break
    with pytest.raises(Killed):
        run(METHODS["bbb"](), LOADERS["loader"](), checkpoint=path, kill_at=(3, 1))
    resumed = METHODS["bbb"]()
    assert run(resumed, LOADERS["loader"](), checkpoint=path) == expected
    assert_equal(resumed.state_dict(), whole.state_dict())


def test_learned_noise_goes_on_in_the_same_objects(tmp_path: Path) -> None:
    """The noise has moved since the run began; that is no other setting."""

    def make() -> credo.MAP:
        torch.manual_seed(0)
        noise = credo.GaussianNoise(0.5, learn=True)
        return credo.MAP(nn.Linear(16, 1), data_size=SIZE, lr=0.1, likelihood=noise)

    batches = [(IMAGES.float().flatten(1), LABELS.float().unsqueeze(1))]
    whole = make()
    expected = run(whole, batches)
    posterior = make()
    with pytest.raises(Killed):
        run(posterior, batches, checkpoint=tmp_path / "c.pt", kill_at=(3, 1))
    assert run(posterior, batches, checkpoint=tmp_path / "c.pt") == expected
    fresh = make()
    assert run(fresh, batches, checkpoint=tmp_path / "c.pt") == expected
    assert_equal(fresh.state_dict(), whole.state_dict())
    assert fresh.likelihood.config()["std"] != pytest.approx(0.5, abs=1e-3)


def test_validation_does_not_disturb_the_run(tmp_path: Path) -> None:
    """Also with a loader for validation that shuffles by the global generator."""
    without = METHODS["bbb"]()
    run(without, LOADERS["loader"]())
    looked = METHODS["bbb"]()
    run(looked, LOADERS["loader"](), validation=DataLoader(FLOATS, batch_size=5, shuffle=True))
    assert_equal(looked.state_dict(), without.state_dict())


def test_a_finished_run_is_not_run_again_but_can_be_longer(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    first = METHODS["bbb"]()
    records = run(first, LOADERS["batches"](), checkpoint=path, schedule="constant")
    again = METHODS["bbb"]()
    steps: list[int] = []
    repeated = list(
        credo.train(
            again,
            LOADERS["batches"](),
            epochs=EPOCHS,
            seed=5,
            checkpoint=path,
            on_step=lambda epoch, *rest: steps.append(epoch),
        )
    )
    assert steps == []
    assert [record.loss for record in repeated] == [record["loss"] for record in records]
    assert_equal(again.state_dict(), first.state_dict())
    longer, straight = METHODS["bbb"](), METHODS["bbb"]()
    run(longer, LOADERS["batches"](), checkpoint=path, epochs=6, schedule="constant")
    run(straight, LOADERS["batches"](), epochs=6, schedule="constant")
    assert_equal(longer.state_dict(), straight.state_dict())


def test_schedules_resume_where_they_were(tmp_path: Path) -> None:
    schedule = make_schedule("steps", epochs=EPOCHS, milestones=[1, 3], decay=0.1, warmup=0.5)
    whole, resumed = METHODS["map"](), METHODS["map"]()
    run(whole, LOADERS["batches"](), schedule=schedule)
    with pytest.raises(Killed):
        run(METHODS["map"](), LOADERS["batches"](), schedule=schedule, checkpoint=tmp_path / "c.pt", kill_at=(3, 1))
    run(resumed, LOADERS["batches"](), schedule=schedule, checkpoint=tmp_path / "c.pt")
    assert_equal(resumed.state_dict(), whole.state_dict())


def as_format_1(path: Path) -> None:
    """The checkpoint as versions wrote it that counted epochs from 0."""
    state = torch.load(path, weights_only=True)
    records = [{**record, "epoch": record["epoch"] - 1} for record in state["progress"]["records"]]
    torch.save({**state, "format": 1, "progress": {**state["progress"], "records": records}}, path)


def test_a_checkpoint_that_counted_epochs_from_0_goes_on(tmp_path: Path) -> None:
    whole, resumed, path = METHODS["bbb"](), METHODS["bbb"](), tmp_path / "c.pt"
    expected = run(whole, LOADERS["batches"]())
    with pytest.raises(Killed):
        run(METHODS["bbb"](), LOADERS["batches"](), checkpoint=path, kill_at=(3, 1))
    as_format_1(path)
    assert run(resumed, LOADERS["batches"](), checkpoint=path) == expected
    assert_equal(resumed.state_dict(), whole.state_dict())
    # It has become a checkpoint of this version, which nothing shifts again.
    assert run(METHODS["bbb"](), LOADERS["batches"](), checkpoint=path) == expected


def test_a_kl_weight_of_ones_own_is_not_taken_for_the_constant_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"

    def run(epochs: int, **options: Any) -> None:
        posterior = credo.BBB(network(), data_size=SIZE, lr=0.05, **options)
        credo.fit(posterior, LOADERS["batches"](), epochs=epochs, checkpoint=path, progress=False)

    run(1, kl_term={"weight": lambda step: 0.01})
    with pytest.raises(credo.FileFormatError, match=r"kl_term\.weight: None there, 'constant' now"):
        run(2)
    run(2, kl_term={"weight": lambda step: 0.01})
