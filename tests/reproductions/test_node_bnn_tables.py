"""The study of node-based BNNs: what each row trains, how it is measured, and the tables they end in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

import credo
from credo.data import Split, load_dataset
from credo.data.errors import DataMissingError
from credo.evaluate import temperature_scale
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.options import own_normalize
from credo.experiments.runs import CHECKPOINT, Run
from credo.models import build_model
from credo.training.files.checkpoint import load_checkpoint
from reproductions.jobs import of_seed, run_jobs
from reproductions.node_bnn import imagenet, tables
from reproductions.node_bnn import rows as node_rows
from reproductions.node_bnn import train as node_train
from reproductions.studies import STUDIES
from reproductions.study import SCALES

STUDY = STUDIES["node-bnn"]


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_is_an_experiment_that_can_be_made(scale: str) -> None:
    for jobs in (tables.tuned_jobs(scale), tables.scratch_jobs(scale), tables.gamma_jobs(scale)):
        assert len({job.name for job in jobs}) == len(jobs)
        for job in jobs:
            make_experiment(job.arguments["experiment"])
            json.dumps(job.arguments)
    assert {job.arguments["variant"] for job in tables.tuned_jobs(scale)} == set(node_rows.VARIANTS)
    for key, table in STUDY.tables.items():
        assert table.count(scale) > 0, key


def cost(given: dict[str, Any]) -> int:
    """Images that pass through training, as often as they do."""
    training, draws = given["experiment"]["training"], given["experiment"]["method"].get("draws", 1)
    return draws * given["members"] * training["epochs"] * training.get("examples", 50_000)


def test_budgets_are_equal() -> None:
    jobs = {job.name: job.arguments for job in tables.tuned_jobs("cpu", ("resnet20",))}
    costs = {name: cost(given) for name, given in jobs.items()}
    assert {count for name, count in costs.items() if not name.endswith("sgd")} == {2 * 38_400}
    assert jobs["resnet20-mc-dropout"]["passes"] == [4, 8, 16, 32]
    assert jobs["resnet20-ensemble"]["passes"] == [4]
    assert jobs["resnet20-ibnn-16"]["passes"] == [16]
    large = [job.arguments for job in tables.tuned_jobs("cpu", ("resnet56",))]
    assert {cost(given) for given in large if given["variant"] != "sgd"} == {25_600}
    full = [job.arguments for job in tables.tuned_jobs("paper")]
    assert {cost(given) for given in full if given["variant"] != "sgd"} == {100_000}
    scratch = [job.arguments for job in tables.scratch_jobs("cpu")]
    assert len({cost(given) for given in scratch}) == 1


def test_all_rows_start_from_one_network() -> None:
    baselines = [job.arguments["twin"] for job in tables.tuned_jobs("smoke")]
    assert baselines[0]["training"] == node_rows.PRETRAINED["smoke"]["convnet"].training
    assert all(other == baselines[0] for other in baselines)
    assert all(job.arguments["twin"] is None for job in tables.tuned_jobs("cpu")), "public weights"


def test_which_rows_are_run() -> None:
    names = [job.name for job in tables.tuned_jobs("cpu", ("resnet56-ibnn-4", "resnet20-sgd"))]
    assert names == ["resnet20-sgd", "resnet56-ibnn-4"]
    with pytest.raises(ValueError, match="Unknown row 'resnet20-ibnn-5'"):
        tables.tuned_jobs("cpu", ("resnet20-ibnn-5",))


def test_the_sizes(tmp_path: Path) -> None:
    records = {job.name: record for job, record in STUDY.tables["1"].run(tmp_path, scale="smoke", workers=1)}
    table = STUDY.tables["1"].finish(records, "smoke")
    assert [row[5] for row in table.rows][1:] == [row[6] for row in table.rows][1:], "the paper's nodes are ours"
    assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.slow
def test_pretrained_rows(tmp_path: Path) -> None:
    """Every kind of row once, on digits; and again from its records."""
    wanted = ("convnet-sgd", "convnet-mc-dropout", "convnet-ensemble", "convnet-ibnn-4")
    found = list(STUDY.tables["2"].run(tmp_path, scale="smoke", workers=1, rows=wanted))
    records = {job.name: record for job, record in found}
    assert set(records) == set(wanted)
    assert set(records["convnet-sgd"]["numbers"]) == {"1", "scaled"}
    assert set(records["convnet-mc-dropout"]["numbers"]) == {"4", "8"}
    assert (tmp_path / "pretrained" / "runs" / "convnet-ensemble" / "member3" / "result.json").exists()
    node = Run(tmp_path / "pretrained" / "runs" / "convnet-ibnn-4" / "run")
    own = node.posterior()
    assert records["convnet-ibnn-4"]["parameters"]["nodes"] == 2 * own.loc.numel()  # type: ignore[union-attr]
    assert node.experiment().model["weights"].endswith("twin")
    direct = credo.predict(own, in_order(node.dataset().test), draws=4)
    expected = node_train.scores(direct.probs, direct.targets)
    assert records["convnet-ibnn-4"]["numbers"]["4"] == pytest.approx(expected, rel=1e-6)
    dropped = Run(tmp_path / "pretrained" / "runs" / "convnet-mc-dropout" / "run")
    halves = [credo.predict(dropped.posterior(), in_order(dropped.dataset().test), draws=4, seed=s) for s in (0, 1)]
    for count, parts in (("4", halves[:1]), ("8", halves)):
        mean = torch.stack([part.probs for part in parts]).mean(0)
        expected = node_train.scores(mean, halves[0].targets)
        assert records["convnet-mc-dropout"]["numbers"][count] == pytest.approx(expected, rel=1e-6)
    starts = [Run(tmp_path / "pretrained" / "runs" / name / "twin").posterior().model.state_dict() for name in wanted]
    for start in starts[1:]:
        torch.testing.assert_close(start, starts[0], rtol=0, atol=0)
    order = [job.name for job, _ in found]
    assert (order[0], order[-1], len(order)) == ("convnet-mc-dropout", "convnet-sgd", 4), "the longest first"
    table = tables.tuned_table(STUDY.tables["2"].records(tmp_path, "smoke"), "smoke")
    assert [row[1] for row in table.rows] == ["1", "1", "4", "8", "4", "4"]
    assert table.rows[0][2] == "23.87"
    assert table.rows[1][2] is None
    assert all(len(row) == len(table.columns) for row in table.rows)
    again = {job.name: record for job, record in STUDY.tables["2"].run(tmp_path, scale="smoke", workers=1, rows=wanted)}
    assert again == records


def test_more_passes_are_added_to_those_made() -> None:
    """Of 2, 3 and 6 passes the network runs six, and each number has the mean of its own."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    posterior = credo.MCDropout(net, data_size=100, rate=0.3)
    test = load_dataset("digits").test
    test = Split(test.x[:50].flatten(1), test.y[:50])
    calls: list[int] = []
    handle = posterior.model.register_forward_hook(lambda module, given, output: calls.append(len(output)))
    found = list(node_train.nested(posterior, test, (2, 3, 6)))
    handle.remove()
    assert calls.count(50) == 6, "and a few rows to choose how to run"
    assert [count for count, _, _ in found] == [2, 3, 6]
    parts = [
        credo.predict(posterior, in_order(test), draws=draws, seed=seed).probs for seed, draws in enumerate((2, 1, 3))
    ]
    torch.testing.assert_close(found[0][1], parts[0])
    torch.testing.assert_close(found[1][1], (2 * parts[0] + parts[1]) / 3)
    torch.testing.assert_close(found[2][1], (2 * parts[0] + parts[1] + 3 * parts[2]) / 6)
    assert not torch.allclose(parts[0], parts[2]), "other draws"
    assert torch.equal(found[2][2], test.y)  # type: ignore[arg-type]


@pytest.mark.slow
def test_shifted_rows(tmp_path: Path) -> None:
    jobs = {job.name: job for job in (*tables.scratch_jobs("smoke"), *tables.gamma_jobs("smoke"))}
    records = {}
    # With several workers they may arrive in any order.
    for name in ("convnet-node-bnn-10", "convnet-node-bnn-0", "convnet-ensemble"):
        ((_, records[name]),) = run_jobs(node_train.shift_job, [jobs[name]], tmp_path, workers=1)
        assert set(records[name]["shift"]["severities"]) == set("12345")
    assert tables.scratch_jobs("smoke")[3] == tables.gamma_jobs("smoke")[0], "trained once for both tables"
    table = tables.scratch_table({n: records[n] for n in list(records)[1:]}, "smoke")
    assert [row[0] for row in table.rows] == ["convnet ensemble of 4", "convnet node-BNN"]
    swept = tables.gamma_table({n: records[n] for n in list(records)[:2]}, "smoke")
    assert [row[0] for row in swept.rows] == ["0", "10"]
    assert all(len(row) == len(t.columns) for t in (table, swept) for row in t.rows)
    experiment = make_experiment(own_normalize(jobs["convnet-node-bnn-0"].arguments["experiment"]))
    trained = prepare(experiment).posterior
    trained.load_state_dict(load_checkpoint(tmp_path / "runs" / "convnet-node-bnn-0" / "run" / CHECKPOINT)["posterior"])
    assert trained.steps == 4 * 10, "1238 images, 128 a batch"
    assert experiment.method["kl_term"]["warmup_steps"] == 26, "two thirds of the steps that were made"
    wrong = records["convnet-node-bnn-0"]["shift"]["severities"]["3"]["accuracy"]
    assert swept.rows[0][5] == f"{100 * (1 - wrong):.1f}"
    shift = records["convnet-node-bnn-0"]["shift"]["mean"]
    assert swept.rows[0][7:9] == [f"{100 * (1 - shift['accuracy']):.1f}", f"{shift['nll']:.3f}"]
    assert swept.columns[7:9] == ["shift error %", "shift NLL"]
    assert swept.rows[0][-1] == f"{records['convnet-node-bnn-0']['wall']['cpu_seconds'] / 60:.1f}"


def test_scaled_probabilities_use_the_other_half() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (200,), generator=generator)
    logits = 3 * torch.randn(200, 3, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 3)
    probs = logits.softmax(1)
    scaled = node_train.cross_scaled(probs, labels)
    fitted = temperature_scale(probs[1::2].log(), labels[1::2])
    torch.testing.assert_close(scaled[::2], fitted(probs[::2].log()))
    assert node_train.scores(scaled, labels)["nll"] < node_train.scores(probs, labels)["nll"]
    assert node_train.scores(scaled, labels)["error"] == node_train.scores(probs, labels)["error"]


# -- folders of images -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, a few images of different sizes."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            class_folder = tmp_path / "images" / part / name
            class_folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 128, (40 + index, 50, 3)) + 120 * label
                Image.fromarray(pixels.astype(np.uint8)).save(class_folder / f"{index}.JPEG")
            (class_folder / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_folders_of_images_repeat_by_seed_and_epoch(folder: Path) -> None:
    images = imagenet.FolderImages(folder / "train")
    assert (len(images), images.class_names) == (10, ["cat", "dog"])
    sizes: dict[str, Any] = {"batch_size": 4, "crop": 32, "resize": 36}
    loader = imagenet.FolderBatches(images, **sizes, seed=1)
    first, second = list(loader), list(loader)
    loader.set_epoch(0)
    again = list(loader)
    assert [len(y) for _, y in first] == [4, 4, 2]
    assert (len(loader), loader.data_size) == (3, 10)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], second[0][0])
    in_order = imagenet.FolderBatches(images, **sizes, seed=None)
    x, y = (torch.cat(parts) for parts in zip(*in_order, strict=True))
    assert y.tolist() == [0] * 5 + [1] * 5
    assert x.shape == (10, 3, 32, 32)
    assert x[:5].mean() < x[5:].mean() - 0.3


def test_boxes() -> None:
    assert imagenet.centre_box((100, 50), 0.5) == (37.5, 12.5, 62.5, 37.5)
    generator = torch.Generator().manual_seed(0)
    for size in ((100, 50), (20, 300), (64, 64)):
        for _ in range(200):
            (left, top, right, bottom), _ = imagenet.random_box(size, generator)
            assert 0 <= left < right <= size[0] + 1e-6
            assert 0 <= top < bottom <= size[1] + 1e-6


@pytest.mark.slow
def test_resnet50_on_a_folder(folder: Path, tmp_path: Path) -> None:
    rows, on_folder = ("resnet50-sgd", "resnet50-ibnn-4"), {"data": "imagenet", "root": str(folder)}
    run = STUDY.tables["2"].run(tmp_path / "out", scale="smoke", workers=1, rows=rows, **on_folder)
    records = {job.name: record for job, record in run}
    stored = STUDY.tables["2"].records(tmp_path / "out", "smoke", **on_folder)
    assert stored == records
    table = tables.tuned_table(stored, "smoke", data="imagenet")
    assert [row[0] for row in table.rows] == ["resnet50 SGD", "resnet50 SGD, temperature scaled", "resnet50 iBNN-4"]
    assert STUDY.tables["2"].records(tmp_path / "out", "smoke") == {}
    (job,) = imagenet.jobs("smoke", rows[1:], str(folder))
    given, side = job.arguments, job.arguments["crop"]
    net = build_model("resnet50", inputs=(3, side, side), classes=2, width=given["width"], seed=0)
    trained = credo.NodeBNN(net, data_size=10, **given["method"])
    state = load_checkpoint(tmp_path / "out" / "imagenet" / "runs" / "resnet50-ibnn-4" / "checkpoint.pt")["posterior"]
    trained.load_state_dict(state)
    images = imagenet.FolderImages(folder / "val")
    test = imagenet.FolderBatches(images, seed=None, **{key: given[key] for key in ("batch_size", "crop", "resize")})
    expected = credo.predict(trained, test, draws=4)
    assert records["resnet50-ibnn-4"]["numbers"] == {
        "4": pytest.approx(node_train.scores(expected.probs, expected.targets), rel=1e-4)
    }
    assert len(imagenet.jobs("paper", (), str(folder))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", imagenet.WEIGHTS)
def test_a_folder_has_the_weights_to_begin_with(folder: Path, tmp_path: Path, name: str) -> None:
    """Torchvision's names; what is measured of SGD is the network with these weights, by hand."""
    net = build_model("resnet50", inputs=[3, 64, 64], classes=2, width=4, seed=7).eval()
    weights = {key: value for key, value in net.state_dict().items() if not key.startswith("normalize")}
    if name.endswith(".pth"):
        torch.save(weights, folder / name)
    else:
        save_file(weights, folder / name)
    images = imagenet.FolderImages(folder / "val")
    loader = imagenet.FolderBatches(images, batch_size=6, crop=64, resize=72, seed=None)
    ((x, y),) = loader
    with torch.no_grad():
        wanted = float(F.cross_entropy(net(x), y))
    small = {"width": 4, "crop": 64, "resize": 72, "batch_size": 4}
    sgd, tuned = imagenet.jobs("cpu", ("resnet50-sgd", "resnet50-ibnn-4"), str(folder))
    found = imagenet.tune_job({**sgd.arguments, **small}, tmp_path / "sgd")
    assert found["numbers"]["1"]["nll"] == pytest.approx(wanted, rel=1e-4)
    still = {**tuned.arguments["method"], "lr": {"nodes.*": 1e-12, "*": 1e-12}, "init": {"spread": 0.01, "std": 1e-3}}
    imagenet.tune_job({**tuned.arguments, **small, "method": still}, tmp_path / "tuned")
    state = load_checkpoint(tmp_path / "tuned" / "checkpoint.pt")["posterior"]
    (trained,) = [value for key, value in state.items() if key.endswith("layer4.2.conv3.weight")]
    torch.testing.assert_close(trained, weights["layer4.2.conv3.weight"])


def test_what_a_folder_must_have(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --root"):
        imagenet.jobs("smoke", (), None)
    with pytest.raises(ValueError, match="Unknown row 'resnet20'"):
        imagenet.jobs("smoke", ("resnet20",), str(folder))
    with pytest.raises(DataMissingError, match="holds no images"):
        imagenet.FolderImages(tmp_path / "nowhere")
    (job,) = imagenet.jobs("cpu", ("resnet50-sgd",), str(folder))
    with pytest.raises(DataMissingError, match=r"resnet50\.safetensors or resnet50\.pth"):
        imagenet.tune_job({**job.arguments, "width": 4, "crop": 32}, tmp_path / "run")
    (folder / "val" / "dog").rename(folder / "val" / "fox")
    with pytest.raises(ValueError, match=r"other classes .*\(2\): dog, fox"):
        imagenet.tune_job(job.arguments, tmp_path / "run")
    (folder / "val" / "goat").mkdir()
    with pytest.raises(DataMissingError, match=r"classes without images \(1\): goat"):
        imagenet.FolderImages(folder / "val")


def test_a_damaged_image_is_named(folder: Path) -> None:
    images = imagenet.FolderImages(folder / "train")
    damaged = images.files[0][0]
    damaged.write_bytes(damaged.read_bytes()[:60])
    with pytest.raises(ValueError, match=f"{damaged.name} cannot be read as an image"):
        list(imagenet.FolderBatches(images, batch_size=4, crop=8, resize=9, seed=None))


def test_a_root_is_the_same_however_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert imagenet.jobs("smoke", (), folder.name) == imagenet.jobs("smoke", (), str(folder))


@pytest.mark.parametrize("scale", SCALES)
def test_notes_tell_of_their_own_rows(scale: str) -> None:
    ours, images = (" ".join(tables.tuned_table({}, scale, data=data).notes) for data in (None, "imagenet"))
    assert "MC-dropout and the 4 networks" in ours
    assert ("digits, a tiny network" in ours) == (scale == "smoke")
    assert not any(word in images for word in ("MC-dropout", "4 networks", "digits", "for every row"))
    given = imagenet.jobs(scale, (), "X")[0].arguments
    assert f"at {given['crop']} pixels" in images
    assert f"for {given['epochs']} epoch" in images
    assert ("torchvision's weights" in images) == given["weights"]
    assert ("random weights" in images) == (scale == "smoke") == ("Preset smoke" in images)


def test_seeds_are_compared_with_the_weights_they_start_from() -> None:
    def record(variant: str, passes: str, error: float) -> dict[str, Any]:
        numbers = {"error": error, "nll": 0.3, "ece": 0.01}
        sizes = {"nodes": 5, "network": 100}
        return {
            "network": "resnet20",
            "variant": variant,
            "numbers": {passes: numbers},
            "parameters": sizes,
            "seconds": 1,
        }

    records = {"resnet20-sgd": record("sgd", "1", 8.0)}
    for seed, error in enumerate((7.0, 6.0, 5.0)):
        records[of_seed("resnet20-ibnn-16", seed)] = record("ibnn-16", "16", error)
    told = "resnet20 iBNN-16 minus the public weights, over seeds, 95 % t intervals: error -2.00 (-4.48 … +0.48), "
    assert any(note.startswith(told) for note in tables.tuned_table(records, "cpu").notes)
    del records["resnet20-ibnn-16-seed2"]
    assert not any("minus the public" in note for note in tables.tuned_table(records, "cpu").notes), "too few seeds"


def test_training_sizes_are_those_of_the_data() -> None:
    assert node_rows.TRAIN_SIZES["digits"] == len(load_dataset("digits").train)


def test_the_longest_rows_are_run_first() -> None:
    (stage,) = tables.tuned_stages("cpu")
    names = [job.name for job in stage.jobs]
    assert names[:2] == ["resnet56-ibnn-32", "resnet56-ibnn-16"]
    assert [name.partition("-")[0] for name in names] == ["resnet56"] * 7 + ["resnet20"] * 7
    assert set(names[7:9]) == {"resnet20-mc-dropout", "resnet20-ibnn-32"}
    assert names[9] == "resnet20-ibnn-16"
    assert names[-1] == "resnet20-sgd"
