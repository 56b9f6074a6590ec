"""Samples of SGLD and SGHMC in files: the same posterior as in memory, read one sample at a time."""

import copy
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_files import forge
from killed_runs import LOADERS, SIZE, Killed, assert_equal, recorded
from killed_runs import network as images_network
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.network.flat_layout import Layout
from credo.core.support.tensor_files import digest_of
from credo.methods import sample_files
from credo.methods.kept_samples import KeptSamples
from credo.methods.sample_files import SampleFiles

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
LOADER = [(X[:12], Y[:12]), (X[12:], Y[12:])]
Sampler = credo.SGLD | credo.SGHMC


def network(seed: int = 0, hidden: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2))


def sampler(
    folder: Path | str | None, method: type[Sampler] = credo.SGHMC, *, seed: int = 0, samples: int = 6, hidden: int = 8
) -> Sampler:
    options: dict[str, Any] = {"burn_in": 2, "every": 1, "samples": samples, "seed": seed, "schedule": "constant"}
    return method(network(seed, hidden), data_size=24, samples_dir=folder, **options)


def trained(folder: Path | str | None, steps: int = 20, **options: Any) -> Sampler:
    """A chain that was thinned once or more: 18 states after the burn-in."""
    posterior = sampler(folder, **options)
    for _ in range(steps):
        step(posterior)
    return posterior


def step(posterior: credo.Posterior) -> None:
    posterior.step(lambda net: F.cross_entropy(net(X), Y))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# -- the same as in memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [credo.SGLD, credo.SGHMC])
def test_draws_and_predictions_are_those_from_memory(method: type[Sampler], tmp_path: Path) -> None:
    memory, files = trained(None, method=method), trained(tmp_path / "s", method=method)
    assert files.collected == memory.collected == 4
    for index in range(4):
        assert_equal(files.sampled_weights.at(index), memory.sampled_weights.at(index))
    for _ in range(3):
        assert_equal(files.draw(), memory.draw())
    assert_equal(list(files.iter_draws(7)), list(memory.iter_draws(7)))
    for options in ({}, {"draws": 2}, {"shared_draws": True, "batch_size": 5}):
        one, other = (credo.predict(posterior, X, **options) for posterior in (memory, files))
        assert torch.equal(one.probs, other.probs)
    assert torch.equal(credo.predictor(memory)(X).probs, credo.predictor(files)(X).probs)
    assert files.describe().spread_count == memory.describe().spread_count


def test_fit_plans_and_trains_the_same(tmp_path: Path) -> None:
    def made(folder: Path | None) -> credo.Posterior:
        return credo.fit(credo.SGHMC(network(), data_size=24, samples=5, samples_dir=folder), LOADER, epochs=25)

    memory, files = made(None), made(tmp_path / "s")
    assert files.planned == memory.planned
    assert torch.equal(credo.predict(files, X).probs, credo.predict(memory, X).probs)


@pytest.mark.parametrize("capacity", [1, 2, 5, 6])
def test_thinning_keeps_the_same_samples(capacity: int, tmp_path: Path) -> None:
    net = nn.Linear(1, 1, bias=False)
    layout, device = Layout(dict(net.named_parameters())), torch.device("cpu")
    memory = KeptSamples(net, layout, capacity, device=device)
    files = KeptSamples(net, layout, capacity, device=device, folder=tmp_path)
    for number in range(1, 40):
        for kept in (memory, files):
            kept.offer_({"weight": torch.full((1, 1), float(number))})
        assert [files.at(i) for i in range(len(files))] == [memory.at(i) for i in range(len(memory))]
        assert (int(files.stride), int(files.offered)) == (int(memory.stride), int(memory.offered))
    assert files.paths() == [file for file in files.paths() if file.exists()]


def test_a_file_holds_a_sample_by_name_and_the_state_holds_none(tmp_path: Path) -> None:
    posterior = trained(tmp_path / "s")
    assert len(posterior.sample_files) == 4
    for index, file in enumerate(posterior.sample_files):
        assert file.parent == tmp_path / "s"
        assert_equal(load_file(file), posterior.sampled_weights.at(index))
    stacks = {n: t.shape for n, t in posterior.state_dict().items() if n.startswith("sampled_weights.")}
    assert {n.removeprefix("sampled_weights."): list(shape) for n, shape in stacks.items()} == {
        "digests": [6, 32],
        "kept": [],
        "offered": [],
        "stride": [],
    }
    assert trained(None).sample_files == []


def test_precisions_and_layouts_of_parameters(tmp_path: Path) -> None:
    def made(folder: Path | None) -> credo.SGHMC:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2).double()).to(
            memory_format=torch.channels_last
        )
        net[1].register_forward_hook(lambda layer, inputs, output: output.double())
        posterior = credo.SGHMC(net, data_size=8, burn_in=0, samples_dir=folder)
        x = torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            posterior.step(lambda net: F.cross_entropy(net(x), torch.arange(8) % 2))
        return posterior

    memory, files = made(None), made(tmp_path)
    for one, other in zip(memory.iter_draws(3), files.iter_draws(3), strict=True):
        assert_equal(one, other)
        assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_prediction_holds_two_samples_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = trained(tmp_path, samples=30)
    assert posterior.collected == 18
    alive: list[weakref.ref[Tensor]] = []
    most, reads, read = 0, 0, SampleFiles.read

    def counted(self: SampleFiles, digest: Tensor) -> dict[str, Tensor]:
        nonlocal most, reads
        found = read(self, digest)
        alive[:] = [each for each in alive if each() is not None]
        alive.append(weakref.ref(found["weights"].untyped_storage()))
        most, reads = max(most, len(alive)), reads + 1
        return found

    monkeypatch.setattr(SampleFiles, "read", counted)
    credo.predict(posterior, X, batch_size=8)
    assert reads == 3 * 18  # each sample once for each batch
    assert most <= 2


def test_nothing_as_large_as_the_samples_is_made(tmp_path: Path) -> None:
    posterior = sampler(tmp_path, samples=10**6)
    assert sum(tensor.numel() for tensor in posterior.state_dict().values() if isinstance(tensor, Tensor)) < 33 * 10**6
    assert posterior.describe().spread_count == 10**6 * (66 + 16)


# -- resuming --------------------------------------------------------------------------------------------------------


CHAIN: dict[str, Any] = {"schedule": "constant", "burn_in": 3, "every": 1, "samples": 5}


def chain(folder: Path) -> credo.SGHMC:
    return credo.SGHMC(images_network(), data_size=SIZE, **CHAIN, samples_dir=folder)


@pytest.mark.parametrize("kill_at", [(2, 3), (3, 2), (6, 1), (8, 4)])
def test_a_killed_chain_resumes_bit_for_bit(kill_at: tuple[int, int], tmp_path: Path) -> None:
    """Killed with samples written after the checkpoint, and thinned since."""
    loader, options = LOADERS["batches"], {"epochs": 8, "validation": LOADERS["loader with a sampler's generator"]()}
    whole = chain(tmp_path / "whole")
    expected = recorded(whole, loader(), **options)[0]
    place = {"checkpoint": tmp_path / "c.pt", **options}
    with pytest.raises(Killed):
        recorded(chain(tmp_path / "killed"), loader(), kill_at=kill_at, **place)
    newer = names(tmp_path / "killed") - _checkpointed(tmp_path / "c.pt")
    for name in newer:  # which resuming replaces
        (tmp_path / "killed" / name).write_bytes(b"half a file")
    resumed = chain(tmp_path / "killed")
    assert recorded(resumed, loader(), **place)[0] == expected
    assert_equal(resumed.state_dict(), whole.state_dict())
    assert_equal(list(resumed.iter_draws(5)), list(whole.iter_draws(5)))
    assert names(tmp_path / "killed") == names(tmp_path / "whole")


def _checkpointed(path: Path) -> set[str]:
    state = torch.load(path, weights_only=True)["posterior"]
    digests = state["sampled_weights.digests"][: int(state["sampled_weights.kept"])]
    return {f"{bytes(digest.tolist()).hex()}.safetensors" for digest in digests}


def test_a_stray_newer_sample_is_ignored(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", steps=16)
    first = trained(tmp_path / "s", steps=9)
    state = copy.deepcopy(first.state_dict())
    step(first)
    assert len(names(tmp_path / "s")) > 6
    save_file({"another": torch.ones(3)}, tmp_path / "s" / "mine.safetensors")
    second = sampler(tmp_path / "s")
    second.load_state_dict(state)
    for _ in range(7):
        step(second)
    assert_equal(second.state_dict(), whole.state_dict())
    assert names(tmp_path / "s") == names(tmp_path / "whole") | {"mine.safetensors"}


def test_a_run_resumes_after_its_folder_was_moved(tmp_path: Path) -> None:
    for place in ("here", "whole"):
        (tmp_path / place).mkdir()
    with pytest.raises(Killed):
        recorded(
            chain(tmp_path / "here" / "s"),
            LOADERS["batches"](),
            epochs=8,
            checkpoint=tmp_path / "here" / "c.pt",
            kill_at=(7, 3),
        )
    (tmp_path / "here").rename(tmp_path / "there")
    place = {"epochs": 8, "checkpoint": tmp_path / "there" / "c.pt"}
    with pytest.raises(credo.FileFormatError, match=r"samples_dir: 'given' there, None now"):
        recorded(credo.SGHMC(images_network(), data_size=SIZE, **CHAIN), LOADERS["batches"](), **place)
    with pytest.raises(FileNotFoundError, match=r"\.safetensors, and .* is not in .*nowhere"):
        recorded(chain(tmp_path / "nowhere"), LOADERS["batches"](), **place)
    resumed = chain(tmp_path / "there" / "s")
    records = recorded(resumed, LOADERS["batches"](), **place)[0]
    whole = chain(tmp_path / "whole")
    assert records == recorded(whole, LOADERS["batches"](), epochs=8)[0]
    assert_equal(resumed.state_dict(), whole.state_dict())


def test_the_best_epoch_is_restored_with_its_samples(tmp_path: Path) -> None:
    def made(folder: Path | None) -> credo.Posterior:
        posterior = sampler(folder, samples=4)
        return credo.fit(posterior, LOADER, epochs=30, validation=LOADER, patience=2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", credo.CredoWarning)  # early stopping by the training rows
        memory, files = made(None), made(tmp_path)
    assert torch.equal(credo.predict(memory, X).probs, credo.predict(files, X).probs)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_file_refers_to_the_samples_beside_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    posterior = trained(run / "samples", hidden=200)
    expected = credo.predict(posterior, X).probs
    credo.save(posterior, run / "p.safetensors")
    assert credo.describe(run / "p.safetensors")["posterior"]["options"]["samples_dir"] == "samples"
    run.rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "p.safetensors"
    again = credo.load(moved, model=network(1, 200))
    assert isinstance(again, credo.SGHMC)
    assert again.collected == 4
    assert again.sample_files[0].parent == tmp_path / "moved" / "samples"
    assert torch.equal(credo.predict(again, X).probs, expected)
    (tmp_path / "moved" / "samples").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"The sample .*, and 3 more, is not in .*give samples_dir="):
        credo.load(moved, model=network(1, 200))
    again = credo.load(moved, model=network(1, 200), samples_dir=tmp_path / "elsewhere")
    assert torch.equal(credo.predict(again, X).probs, expected)
    credo.save(again, tmp_path / "q.safetensors")
    assert credo.describe(tmp_path / "q.safetensors")["posterior"]["options"]["samples_dir"] == "elsewhere"
    assert torch.equal(credo.predict(credo.load(tmp_path / "q.safetensors", model=network(1, 200)), X).probs, expected)


def test_paths_are_relative_to_where_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data" / "run")
    monkeypatch.chdir(tmp_path)
    posterior = sampler("samples")
    monkeypatch.chdir(tmp_path / "data")
    for _ in range(6):
        step(posterior)
    assert len(names(tmp_path / "samples")) == 4
    credo.save(posterior, tmp_path / "link" / "p.safetensors")
    again = credo.load(tmp_path / "link" / "p.safetensors", model=network(1))
    assert torch.equal(credo.predict(again, X).probs, credo.predict(posterior, X).probs)


def test_chains_may_share_a_folder(tmp_path: Path) -> None:
    def chains(folder: Path | None) -> credo.Ensemble:
        return credo.Ensemble([sampler(folder, seed=seed) for seed in range(2)])

    memory, files = chains(None), chains(tmp_path / "s")
    for ensemble in (memory, files):
        for _ in range(10):
            step(ensemble)
    expected = credo.predict(memory, X, draws=12).probs
    assert torch.equal(credo.predict(files, X, draws=12).probs, expected)
    assert credo.chain_study(files, X, Y) == credo.chain_study(memory, X, Y) is not None
    credo.save(files, tmp_path / "p.safetensors")
    (tmp_path / "moved").mkdir()
    for name in ("s", "p.safetensors"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    again = credo.load(tmp_path / "moved" / "p.safetensors", model=network())
    assert torch.equal(credo.predict(again, X, draws=12).probs, expected)
    # One folder for all members, where it was given another name.
    (tmp_path / "moved" / "s").rename(tmp_path / "t")
    again = credo.load(tmp_path / "moved" / "p.safetensors", model=network(), samples_dir=tmp_path / "t")
    assert torch.equal(credo.predict(again, X, draws=12).probs, expected)


def test_samples_do_not_change_between_memory_and_files(tmp_path: Path) -> None:
    memory, files = trained(None), trained(tmp_path / "s")
    credo.save(memory, tmp_path / "m.safetensors")
    credo.save(files, tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match=r"m\.safetensors has its samples in itself: samples_dir=.* is not possible"):
        credo.load(tmp_path / "m.safetensors", model=network(), samples_dir=tmp_path / "s")
    with pytest.raises(ValueError, match=r"f\.safetensors has its samples in the folder s: samples_dir=None"):
        credo.load(tmp_path / "f.safetensors", model=network(), samples_dir=None)
    with pytest.raises(ValueError, match="were in memory: load it into a posterior without samples_dir="):
        files.load_state_dict(memory.state_dict())
    with pytest.raises(ValueError, match="were in files: load it into a posterior with samples_dir="):
        memory.load_state_dict(files.state_dict())


def test_a_description_of_more_samples_than_a_file_has(tmp_path: Path) -> None:
    path = credo.save(trained(tmp_path / "s"), tmp_path / "p.safetensors")
    forge(path, lambda about: about["posterior"]["options"].update(samples=10**9))
    with pytest.raises(credo.FileFormatError, match="describes more than it holds"):
        credo.load(path, model=network())
    forge(path, lambda about: about["posterior"]["options"].update(samples=6, samples_dir=3))
    with pytest.raises(credo.FileFormatError, match=r"p\.safetensors describes"):
        credo.load(path, model=network())


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 0x10
    file.write_bytes(raw)


def replace(file: Path) -> None:
    save_file({"0.weight": torch.ones(8, 3)}, file)


def test_an_equal_file_stays_as_it_is(tmp_path: Path) -> None:
    def stats() -> dict[str, tuple[int, int]]:
        return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in tmp_path.iterdir()}

    trained(tmp_path)
    before = stats()
    trained(tmp_path)
    assert stats() == before


@pytest.mark.parametrize("damage", [truncate, flip, replace])
def test_a_damaged_file_is_replaced(damage: Callable[[Path], None], tmp_path: Path) -> None:
    file = trained(tmp_path).sample_files[2]
    whole = file.read_bytes()
    damage(file)
    assert file.read_bytes() != whole
    trained(tmp_path)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (Path.unlink, FileNotFoundError, "The sample {} is not in .*give samples_dir="),
        (truncate, credo.FileFormatError, "{} is not a complete safetensors file"),
        (flip, credo.FileFormatError, "{} was changed after it was written"),
        (replace, credo.FileFormatError, "{} was changed after it was written"),
    ],
)
def test_a_damaged_sample_is_named(
    damage: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    posterior = trained(tmp_path / "s")
    credo.save(posterior, tmp_path / "p.safetensors")
    fresh = credo.load(tmp_path / "p.safetensors", model=network())
    file = posterior.sample_files[2]
    damage(file)
    with pytest.raises(error, match=message.format(file.name)):
        credo.predict(fresh, X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("0.bias"), "other names, shapes or dtypes"),
        (lambda tensors: tensors.update({"0.bias": tensors["0.bias"].double()}), "other names, shapes or dtypes"),
        (lambda tensors: tensors["0.bias"].fill_(float("nan")), "NaN or infinite values"),
        (lambda tensors: tensors["1.running_var"].fill_(-1.0), "negative variances"),
    ],
)
def test_a_forged_sample_with_a_digest_that_fits(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    posterior = trained(tmp_path)
    tensors = load_file(posterior.sample_files[1])
    change(tensors)
    digest = bytes.fromhex(digest_of(tensors))
    posterior.sampled_weights.digests[1] = torch.tensor(list(digest), dtype=torch.uint8)
    save_file(tensors, posterior.sample_files[1])
    with pytest.raises(credo.FileFormatError, match=message):
        credo.predict(posterior, X)


def test_a_sample_that_cannot_be_written_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = trained(tmp_path, steps=8)  # full: the next one thins
    before = copy.deepcopy(posterior.sampled_weights.state_dict())

    def full(*args: Any, **options: Any) -> None:
        raise OSError("the disk is full")

    tensors = {name: tensor + 1 for name, tensor in posterior.model.state_dict().items()}  # in no file yet
    with monkeypatch.context() as patched:
        patched.setattr(sample_files, "write_atomically", full)
        posterior.sampled_weights.offer_(tensors)  # number 7 thins and is dropped: nothing is written
        before |= {name: t.clone() for name, t in posterior.sampled_weights.state_dict().items()}
        with pytest.raises(OSError, match="full"):
            posterior.sampled_weights.offer_(tensors)
    assert_equal(dict(posterior.sampled_weights.state_dict()), dict(before))
    posterior.sampled_weights.offer_(tensors)
    assert posterior.collected == 4


@pytest.mark.parametrize("wrong", [3, "", True])
def test_what_is_no_folder(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be the path of a folder"):
        credo.SGHMC(network(), data_size=24, samples_dir=wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: give the path of a folder"):
        credo.SGHMC(network(), data_size=24, samples_dir=tmp_path / "file")


# -- threads and copies ----------------------------------------------------------------------------------------------


def test_threads_predict_while_another_trains(tmp_path: Path) -> None:
    memory, posterior = trained(None), trained(tmp_path)
    frozen = posterior.frozen_copy()
    expected = credo.predict(memory, X).probs
    found: list[Tensor] = []
    errors: list[BaseException] = []

    def predict() -> None:
        try:
            for _ in range(10):
                found.append(credo.predict(frozen, X).probs)
                credo.predict(posterior, X)  # of whichever samples there are
                posterior.draw()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=predict) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        step(posterior)
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) == 30
    assert all(torch.equal(one, expected) for one in found)


def test_copies_keep_their_samples(tmp_path: Path) -> None:
    posterior = trained(tmp_path)
    expected = credo.predict(posterior, X).probs
    copies = [copy.deepcopy(posterior), posterior.frozen_copy(), posterior.uncalibrated()]
    for _ in range(20):
        step(posterior)
    assert not torch.equal(credo.predict(posterior, X).probs, expected)
    assert all(torch.equal(credo.predict(one, X).probs, expected) for one in copies)
