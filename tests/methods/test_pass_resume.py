"""Passes over the data that are killed: the same call resumes them, with the same result bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import FLOATS, IMAGES, LABELS, SIZE, Killed, assert_equal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.errors import CheckpointWarning, FileFormatError
from credo.data import Batches
from credo.data.splits import Split
from credo.methods.pass_file import PassFile
from credo.training import StopRequest, TrainingStopped

BATCHES = 8
OUTPUTS = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(3))


def conv(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3)).eval()


def laplace(**options: Any) -> Callable[[], credo.Laplace]:
    return lambda: credo.Laplace(conv(), data_size=SIZE, **options)


POSTERIORS: dict[str, Callable[[], Any]] = {
    "last layer": laplace(),
    "kron, sampled": laplace(random="all", curvature="sampled"),
    "kron, exact": laplace(random="all"),
    "diag": laplace(random="all", structure="diag"),
    "full": laplace(structure="full"),
    "low-rank": laplace(random="all", structure="low-rank", rank=3),
    "noise of each output": laplace(likelihood=credo.GaussianNoise(outputs=3)),
    "one noise": laplace(likelihood="gaussian"),
    "LastLayer, classes": lambda: credo.LastLayer(conv(), data_size=SIZE),
    "LastLayer, values": lambda: credo.LastLayer(conv(), data_size=SIZE, likelihood="gaussian"),
}


def shuffled(images: Any, targets: Any) -> Any:
    return DataLoader(TensorDataset(images, targets), batch_size=3, shuffle=True)


LOADERS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda x, y: list(zip(x.split(3), y.split(3), strict=True)),
    "batches": lambda x, y: Batches(Split(x, y), batch_size=3, augment="flip-crop"),
    "global generator": shuffled,
    "own generator": lambda x, y: DataLoader(
        TensorDataset(x, y), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
}


class Dying:
    """A loader that fails before a batch."""

    def __init__(self, loader: Any, at: int) -> None:
        self.loader, self.at = loader, at

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            if index == self.at:
                raise Killed
            yield batch


def loader_for(name: str, kind: str) -> Any:
    targets = OUTPUTS if kind in ("noise of each output", "one noise", "LastLayer, values") else LABELS
    return LOADERS[name](IMAGES.float() / 255, targets)


def examples_seen(kind: type[nn.Module], run: Callable[[], object]) -> int:
    """Examples that pass through layers of this kind while `run` runs."""
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda layer, inputs, out: seen.append(len(out)) if type(layer) is kind else None
    )
    try:
        run()
    finally:
        handle.remove()
    return sum(seen)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", POSTERIORS)
def test_a_killed_pass_resumes_to_the_same_bits(kind: str, loader: str, tmp_path: Path) -> None:
    path = tmp_path / "pass.pt"
    options: dict[str, Any] = {"checkpoint": path, "checkpoint_every": 2, "progress": False}
    torch.manual_seed(4)
    whole = POSTERIORS[kind]().fit(loader_for(loader, kind), progress=False)
    for at in (5, 7):  # killed twice: after four batches, after six
        with pytest.raises(Killed):
            POSTERIORS[kind]().fit(Dying(loader_for(loader, kind), at), **options)
        assert path.exists()
        torch.manual_seed(5)  # of another process
    outside = torch.get_rng_state()
    resumed = POSTERIORS[kind]()
    seen = examples_seen(nn.Conv2d, lambda: resumed.fit(loader_for(loader, kind), **options))
    assert_equal(resumed.state_dict(), whole.state_dict())
    assert not path.exists()
    assert resumed.uncertainty_needs == ""
    if kind in ("last layer", "LastLayer, classes", "LastLayer, values"):
        assert seen == SIZE - 6 * 3  # one forward pass, over what was left
    assert torch.equal(torch.get_rng_state(), outside)


def test_the_file_is_written_by_time_or_number_and_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "folder" / "pass.pt", []
    torch_save = torch.save
    monkeypatch.setattr(torch, "save", lambda *given: (written.append(given[0]["done"]), torch_save(*given))[1])
    batches = loader_for("list", "last layer")
    laplace()().fit(batches, checkpoint=path)
    assert written == []  # in less than ten minutes
    laplace()().fit(batches, checkpoint=path, checkpoint_minutes=1e-9)
    assert written == list(range(1, BATCHES + 1))
    written.clear()
    laplace()().fit(batches, checkpoint=path, checkpoint_minutes=None, checkpoint_every=3)
    assert written == [3, 6]
    assert list(tmp_path.glob("**/*.p*")) == []


def stopped_at(path: Path, at: int = 5, build: Callable[[], Any] = POSTERIORS["last layer"]) -> None:
    with pytest.raises(Killed):
        build().fit(Dying(loader_for("list", "last layer"), at), checkpoint=path, checkpoint_every=2, progress=False)


@pytest.mark.parametrize("what", ["weights", "settings", "data", "number of batches"])
def test_a_file_of_something_else_restarts_the_pass(what: str, tmp_path: Path) -> None:
    path, batches = tmp_path / "pass.pt", loader_for("list", "last layer")
    stopped_at(path)
    posterior, plain = (laplace(structure="diag" if what == "settings" else "kron")() for _ in range(2))
    if what == "weights":
        for each in (posterior, plain):
            with torch.no_grad():
                each.model[0].weight.add_(0.1)
    if what == "data":
        batches[0] = (batches[0][0] + 0.5, batches[0][1])
    if what == "number of batches":
        batches = batches[:-1]
    with pytest.warns(CheckpointWarning, match=r"pass.pt is of other weights, settings or data: the pass restarts"):
        posterior.fit(batches, checkpoint=path)
    assert_equal(posterior.state_dict(), plain.fit(batches).state_dict())


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path, batches = tmp_path / "checkpoint.pt", loader_for("list", "last layer")
    credo.fit(credo.MAP(conv(), data_size=SIZE), DataLoader(FLOATS, batch_size=6), epochs=1, checkpoint=path)
    content = path.read_bytes()
    with pytest.raises(FileFormatError, match=r"checkpoint.pt is not the state of a pass over data: give another path"):
        laplace()().fit(batches, checkpoint=path)
    assert path.read_bytes() == content
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match=r"is not a complete file .*Delete it to restart"):
        laplace()().fit(batches, checkpoint=path)
    for wrong in ({"checkpoint_every": 0}, {"checkpoint_minutes": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            laplace()().fit(batches, checkpoint=tmp_path / "x.pt", **wrong)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "pass.pt"
    stopped_at(path)
    (tmp_path / ".pass.pt.0badcafe.part").write_bytes(b"half")
    laplace()().fit(loader_for("list", "last layer"), checkpoint=path)
    assert list(tmp_path.iterdir()) == []


def swag() -> credo.SWAG:
    return credo.SWAG(conv().train(), data_size=SIZE, start=0, every=1, batchnorm_draws=4)


TRAINED: dict[str, Callable[[], credo.Posterior]] = {
    "laplace": laplace(random="all", curvature="sampled"),
    "last-layer": POSTERIORS["LastLayer, classes"],
    "ensemble": lambda: credo.Ensemble([credo.Laplace(conv(s), data_size=SIZE, seed=s) for s in range(2)]),
    "online": laplace(evidence=credo.Evidence(every=1)),
    "swag": swag,
}


@pytest.mark.parametrize("kind", TRAINED)
def test_the_pass_of_a_training_resumes_beside_its_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(**options: Any) -> credo.Posterior:
        loader = DataLoader(FLOATS, batch_size=3, shuffle=True)
        return credo.fit(TRAINED[kind](), loader, epochs=2, checkpoint_every=2, progress=False, **options)

    items: list[int] = []
    after = PassFile._after

    def counted(self: PassFile, done: int, *given: Any) -> None:
        after(self, done, *given)
        items.append(done)
        if len(items) == kill_at:
            raise Killed

    monkeypatch.setattr(PassFile, "_after", counted)
    path = tmp_path / "checkpoint.pt"
    kill_at = 0
    whole = trained(checkpoint=tmp_path / "whole" / "checkpoint.pt")
    done = list(items)
    assert len(done) == {"ensemble": 2 * BATCHES, "online": 2 * BATCHES, "swag": 5}.get(kind, BATCHES)
    for kill_at in (3, max(2, len(done) - 5), 1):  # noqa: B007 - `counted` reads it
        items.clear()
        with pytest.raises(Killed):
            trained(checkpoint=path)
        assert list(tmp_path.glob("checkpoint.pass-*.pt")) != []
    items.clear()
    kill_at = 0
    resumed = trained(checkpoint=path)
    assert len(items) < len(done)  # not all of it again
    states = [{k: v for k, v in each.state_dict().items() if torch.is_tensor(v)} for each in (resumed, whole)]
    assert_equal(*states)
    assert sorted(file.name for file in tmp_path.glob("*.pt")) == ["checkpoint.1.pt", "checkpoint.pt"]


def test_a_pass_that_is_asked_to_stop_saves_and_resumes(tmp_path: Path) -> None:
    request, path = StopRequest(), tmp_path / "checkpoint.pt"
    build, batches = POSTERIORS["kron, exact"], list(DataLoader(FLOATS, batch_size=3))
    whole = credo.fit(build(), batches, epochs=1, progress=False)
    records = credo.train(build(), batches, epochs=1, checkpoint=path, stop=request)
    next(records)
    request.ask()
    with pytest.raises(TrainingStopped, match="in a pass over the data after the last epoch; the state is in"):
        next(records)
    assert torch.load(tmp_path / "checkpoint.pass-0.pt")["done"] == 1
    resumed = credo.fit(build(), batches, epochs=1, checkpoint=path, progress=False)
    states = [{k: v for k, v in each.state_dict().items() if torch.is_tensor(v)} for each in (resumed, whole)]
    assert_equal(*states)
