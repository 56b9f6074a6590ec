"""The study of Shridhar et al. (2019): its networks, what is measured of them, and its tables."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from credo.compress import prune
from credo.data import DataMissingError, as_float, load_dataset
from credo.evaluate.ensembles import ensemble_study
from credo.experiments.config import make_experiment, prepare
from credo.experiments.options import own_normalize
from credo.models import build_model
from credo.predict import predict
from credo.training.schedule import Plateau
from reproductions.bayesian_cnn import networks, rows
from reproductions.bayesian_cnn.tables import draw_figures
from reproductions.bayesian_cnn.uncertainty import class_split, snapshot
from reproductions.jobs import Job, run_jobs
from reproductions.studies import STUDIES
from reproductions.study import SCALES

STUDY = STUDIES["bayesian-cnn"]
TABLES = list(STUDY.tables)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", TABLES)
def test_every_network_is_an_experiment_that_can_be_made(scale: str, table: str) -> None:
    jobs = [job for stage in STUDY.tables[table].stages(scale) for job in stage.jobs]
    assert len({job.name for job in jobs}) == len(jobs) == STUDY.tables[table].count(scale)
    for job in jobs:
        json.dumps(job.arguments)
        for experiment in job.arguments.get("experiments", {"": job.arguments.get("experiment")}).values():
            found = make_experiment(own_normalize(experiment))
            build_model(**{**found.model, "inputs": [1, 28, 28] if found.data["name"] == "mnist" else [3, 32, 32]})


def test_the_published_settings() -> None:
    found = make_experiment(rows.experiment_for(rows.Row("alexnet", "bayesian"), "cifar10", "paper"))
    method, training = found.method, found.training
    assert (method["lr"], method["prior"], method["temperature"], method["noise"]) == (1e-3, 0.1, 0.1, "lrt")
    assert (method["init"]["mean"], method["init"]["rho"]) == (0.1, [-5.0, 0.1])
    assert (training.epochs, training.batch_size, training.validation) == (200, 256, 0.2)
    assert training.make_schedule() == Plateau(decay=0.1, wait=6)
    assert (found.model["activation"], found.model["beta"]) == ("softplus", 1.0)
    plain = make_experiment(rows.experiment_for(rows.Row("alexnet", "dropout-3"), "cifar100", "paper"))
    assert (plain.method["name"], plain.model["activation"]) == ("map", "relu")
    assert (plain.model["dropout"], plain.model["dropout_layers"]) == (0.5, 3)


def test_the_forms_of_noise_and_deviation() -> None:
    wanted = {
        "lrt-free": ("lrt", "free", "auto"),
        "weights-free": ("weights", "free", "auto"),
        "lrt-relative": ("lrt", "relative", "ard"),
        "weights-relative": ("weights", "relative", "ard"),
    }
    for scale in ("cpu", "paper"):
        jobs = {job.arguments["form"]: job for job in networks.form_jobs(scale)}
        methods = {form: make_experiment(job.arguments["experiment"]).method for form, job in jobs.items()}
        assert {form: (m["noise"], m["spread"], m["kl_term"]["estimator"]) for form, m in methods.items()} == wanted


def test_tables_share_their_networks() -> None:
    first = {job.name: job.arguments for job in networks.accuracy_jobs("cpu")}
    others = [job for table in TABLES[1:-1] for job in networks.JOBS[table]("cpu", 0)]
    shared = [job for job in others if job.name in first]
    assert all(first[job.name] == job.arguments for job in shared)
    assert {job.name for job in others} - set(first) == {
        "lenet5-bayesian-mnist-weights-free",
        "lenet5-bayesian-mnist-lrt-relative",
        "lenet5-bayesian-mnist-weights-relative",
        "alexnet-half-dropout-1-cifar100",
        "alexnet-half-dropout-3-cifar100",
    }


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As jobs run: several threads may sum the same numbers in another order, and differ in the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Three networks of scale smoke: one of LeNet-5 that is watched, and two that are compared."""
    folder = tmp_path_factory.mktemp("study")
    wanted = ("lenet5-bayesian-mnist", "alexnet-frequentist-cifar100", "alexnet-bayesian-cifar100")
    found = {}
    for job in networks.accuracy_jobs("smoke"):
        if job.name in wanted:
            record = networks.train_job(job.arguments, folder / job.name)
            found[job.name] = {**json.loads(json.dumps(record)), "arguments": job.arguments, "folder": str(folder)}
    return found


@pytest.mark.slow
def test_a_watched_network(records: dict[str, dict[str, Any]]) -> None:
    record = records["lenet5-bayesian-mnist"]
    assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2]
    softmax = record["uncertainty"]["softmax"]
    assert softmax["aleatoric"] < record["epochs"][0]["softmax"]["aleatoric"]
    assert "uncertainty" not in records["alexnet-bayesian-cifar100"]
    assert record["form"] == "lrt-free"
    assert (records["alexnet-bayesian-cifar100"]["form"], records["alexnet-frequentist-cifar100"]["form"]) == (
        "weights-free",
        None,
    )
    assert record["numbers"]["accuracy"] == 100 * record["test"]["accuracy"]
    kept = {rate: pruned["kept"] for rate, pruned in record["numbers"]["pruned"].items()}
    weights, biases = 8 * 9 + 64 * 9 + 128 * 16 + 160, 8 + 8 + 16 + 10
    assert kept["0.5"] == weights - round(0.5 * weights) + biases
    assert record["parameters"]["needed"] == 2 * (weights + biases)


@pytest.mark.slow
def test_what_was_measured_is_of_the_trained_network(records: dict[str, dict[str, Any]]) -> None:
    """Everything once more from the stored run, by hand."""
    record = records["lenet5-bayesian-mnist"]
    run = networks.Run(Path(record["folder"]) / "lenet5-bayesian-mnist" / "run")
    posterior, dataset, draws = run.posterior(), run.dataset(), record["arguments"]["draws"]

    def accuracy(trained: Any, x: torch.Tensor, y: torch.Tensor) -> float:
        return 100 * float((predict(trained, as_float(x), draws=draws).probs.argmax(1) == y).double().mean())

    test = dataset.test
    assert record["numbers"]["accuracy"] == pytest.approx(accuracy(posterior, test.x, test.y))
    smaller = run.posterior()
    prune(smaller, rate=0.9, by="magnitude")
    pruned = record["numbers"]["pruned"]["0.9"]["accuracy"]
    assert pruned == pytest.approx(accuracy(smaller, test.x, test.y))
    assert pruned != record["numbers"]["accuracy"]
    assert record["numbers"]["pruned"]["0"]["accuracy"] == record["numbers"]["accuracy"], "as many draws, all weights"

    plain_record = records["alexnet-frequentist-cifar100"]
    plain = networks.Run(Path(plain_record["folder"]) / "alexnet-frequentist-cifar100" / "run").posterior()
    both = plain_record["numbers"]["by_draws"]["1"]
    assert both["test"] == pytest.approx(accuracy(plain, test.x, test.y))
    assert both["train"] == pytest.approx(accuracy(plain, dataset.train.x, dataset.train.y))
    assert both["train"] != both["test"]

    first, last = ({k: v for k, v in epoch.items() if k != "epoch"} for epoch in record["epochs"])
    parts = (networks._first(dataset.train), networks._first(test))
    assert last == json.loads(json.dumps(snapshot(posterior, *parts, draws=10)))
    assert first["softmax"] != last["softmax"]

    found = record["uncertainty"]["softmax"]
    own = class_split(posterior, test.x, draws=draws)
    ood = class_split(posterior, load_dataset("photo-patches").test.x, draws=draws)
    for index, name in enumerate(("aleatoric", "epistemic")):
        mine, other = own.each()[index], ood.each()[index]
        higher = (other[:, None] > mine[None, :]).double() + 0.5 * (other[:, None] == mine[None, :]).double()
        assert found["foreign"]["photo-patches"]["auroc"][name] == pytest.approx(float(higher.mean()), abs=1e-6)
        of_threes = mine[test.y == 3].double().mean()
        assert found["by_class"][name][3] == pytest.approx(float(of_threes), rel=1e-5)
    table = STUDY.tables["uncertainty"].finish({"lenet5-bayesian-mnist": record}, "smoke")
    auroc = found["foreign"]["photo-patches"]["auroc"]
    assert f"AUROC {auroc['epistemic']:.3f} ({auroc['aleatoric']:.3f})" in table.rows[0][-1]


@pytest.mark.slow
def test_held_out_images_are_no_training_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At scale paper a fifth is held out: accuracy in training is of the others."""
    job = next(job for job in networks.dropout_jobs("smoke") if job.arguments["kind"] == "frequentist")
    experiment = {**job.arguments["experiment"]}
    experiment["training"] = {**experiment["training"], "validation": 0.2}
    measured: list[int] = []

    def study(posterior: Any, batches: Any, sizes: Any, **options: Any) -> Any:
        measured.append(len(batches.split))
        return ensemble_study(posterior, batches, sizes, **options)

    monkeypatch.setattr(networks, "ensemble_study", study)
    arguments = {**job.arguments, "experiment": experiment, "watched": True}
    record = networks.train_job(arguments, tmp_path)
    prepared = prepare(make_experiment(experiment))
    assert measured == [len(prepared.loader.split), 359] == [1150, 359]
    run = networks.Run(tmp_path / "run")
    parts = (networks._first(prepared.loader.split), networks._first(run.dataset().test))
    assert record["epochs"][-1]["train_accuracy"] == snapshot(run.posterior(), *parts, draws=10)["train_accuracy"]


@pytest.mark.slow
def test_missing_ood_data_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, records: dict[str, dict[str, Any]]
) -> None:
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    digits = load_dataset("digits")
    found, missing = networks._ood_images(digits)
    assert (list(found), missing) == (["photo-patches"], [])
    assert networks._ood_images(replace(digits, name="mnist")) == ({}, ["fashion-mnist", "notmnist"])
    record = records["lenet5-bayesian-mnist"]
    assert record["uncertainty"]["missing"] == []
    lacking = {**record, "uncertainty": {**record["uncertainty"], "missing": ["notmnist"]}}
    for one, told in ((record, False), (lacking, True)):
        notes = " ".join(STUDY.tables["uncertainty"].finish({"lenet5-bayesian-mnist": one}, "smoke").notes)
        assert ("MNIST: missing files of notmnist" in notes) is told


def test_missing_data_are_missed_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digits, cifar = (Job(name, {"experiment": {"data": {"name": name}}}) for name in ("digits", "cifar100"))
    run: list[str] = []

    def work(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        run.append(arguments["experiment"]["data"]["name"])
        return {}

    with pytest.raises(DataMissingError, match="cifar100"):
        list(run_jobs(work, [digits, cifar], tmp_path / "records", workers=1))
    assert run == []
    list(run_jobs(work, [digits], tmp_path / "records", workers=1))
    assert run == ["digits"]


@pytest.mark.slow
def test_a_killed_run_measures_the_epochs_it_lacks(tmp_path: Path, records: dict[str, dict[str, Any]]) -> None:
    job = next(job for job in networks.uncertainty_jobs("smoke") if job.arguments["data"] == "mnist")
    whole = records[job.name]["epochs"]
    run = networks.Run(tmp_path / "run")
    stopped = run.train(make_experiment(job.arguments["experiment"]), draws=5)
    next(stopped)
    stopped.close()  # type: ignore[attr-defined]
    assert not (run.folder / networks.EPOCHS).exists()
    assert networks._train(run, job.arguments) == whole
    assert networks._train(run, job.arguments) == whole, "a finished run only reads its file"


@pytest.mark.slow
def test_the_tables(records: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    sizes = {job.name: networks.size_job(job.arguments, tmp_path) for job in networks.size_jobs("smoke")}
    made = {key: STUDY.tables[key].finish(sizes if key == "parameters" else records, "smoke") for key in TABLES}
    for table in made.values():
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[0] for row in made["1"].rows] == ["AlexNet, Bayesian", "AlexNet, frequentist", "LeNet-5, Bayesian"]
    record = records["lenet5-bayesian-mnist"]
    alexnet, plain = (records[f"alexnet-{kind}-cifar100"]["numbers"] for kind in ("bayesian", "frequentist"))
    row = made["1"].rows[2]
    assert row[1] == 98
    assert row[2].startswith(f"{record['numbers']['accuracy']:.2f} (")
    assert (row[3], row[4]) == (69, None)
    assert made["1"].rows[0][6].startswith(f"{alexnet['accuracy']:.2f} (")

    of_draws = [plain["by_draws"]["1"], alexnet["by_draws"]["25"], alexnet["by_draws"]["100"]]
    ours = [f"{numbers['train']:.2f} / {numbers['test']:.2f}" for numbers in of_draws]
    assert [row[1:] for row in made["dropout"].rows] == [
        [theirs, mine] for theirs, mine in zip(("83 / 38", "54 / 37", "48 / 37"), ours, strict=True)
    ]
    assert made["forms"].rows[0][1:4] == [
        made["1"].rows[2][2],
        f"{record['test']['nll']:.4f}",
        f"{record['test']['ece']:.4f}",
    ]
    assert made["uncertainty"].rows[0][1] == 0.0096
    epochs = [epoch["softmax"]["epistemic"] for epoch in record["epochs"]]
    assert made["uncertainty"].rows[0][6:9] == [f"{e:.4f}" for e in (epochs[0], max(epochs), epochs[-1])]
    ood = record["uncertainty"]["softmax"]["foreign"]["photo-patches"]
    assert f"photo-patches {ood['epistemic']:.4f}, AUROC" in made["uncertainty"].rows[0][-1]
    assert made["pruning"].columns[2:] == ["whole", "−50 %", "−75 %", "−90 %"]
    for row, numbers in zip(made["pruning"].rows, (alexnet, record["numbers"]), strict=True):
        assert row[1:] == [None, *(f"{pruned['accuracy']:.2f}" for pruned in numbers["pruned"].values())]
    counts = sizes["lenet5"]["counts"]
    assert made["parameters"].rows[-1] == [
        "LeNet-5",
        *(
            f"{counts[kind]['needed']:,}"
            for kind in ("frequentist", "bayesian", "pruned", "relative", "relative-layer")
        ),
    ]


@pytest.mark.slow
def test_the_pictures_say_what_was_trained(
    records: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, title: titles.append(title))
    assert [path.name for path in draw_figures(records, "smoke", tmp_path)] == ["uncertainty-mnist.png"]
    assert titles == ["digits, convnet"]


def test_parameters_are_counted(tmp_path: Path) -> None:
    job = next(job for job in networks.size_jobs("smoke") if job.name == "lenet5")
    counts = networks.size_job(job.arguments, tmp_path)["counts"]
    network = sum(
        p.numel()
        for p in prepare(make_experiment(job.arguments["experiments"]["frequentist"])).posterior.model.parameters()
    )
    assert counts["frequentist"]["needed"] == network
    assert counts["bayesian"]["needed"] == counts["relative"]["needed"] == 2 * network
    assert counts["relative-layer"]["needed"] == network + 8
    weights = sum(
        p.numel()
        for p in prepare(make_experiment(job.arguments["experiments"]["bayesian"])).posterior.model.parameters()
        if p.dim() > 1
    )
    assert counts["pruned"]["needed"] == 2 * (network - round(0.5 * weights))
