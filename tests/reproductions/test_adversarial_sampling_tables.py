"""The study of Zhang et al. (2022): its networks, its tables and figures, and what a fine-tune begins with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reproductions.adversarial_sampling import networks as adversarial_jobs
from reproductions.adversarial_sampling import rows as adversarial_rows
from reproductions.adversarial_sampling import tables as adversarial_sampling
from reproductions.jobs import SCALES
from reproductions.studies import STUDIES

from credo import BBB, MAP, Ensemble, FileFormatError, UnsupportedModelError, save
from credo.evaluate import paired_difference
from credo.experiments.config import make_experiment, prepare
from credo.experiments.initial_weights import load_weights_
from credo.methods.adversarial_sampling import make_attack
from credo.models import build_model

STUDY = STUDIES["adversarial-sampling"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", [1, 2, 3, 4, "differences", "settings"])
def test_every_network_is_an_experiment_that_can_be_made(scale: str, table: int | str) -> None:
    jobs, twins = adversarial_jobs.jobs_of(table, scale), adversarial_jobs.twins_of(table, scale)
    assert len({job.name for job in [*twins, *jobs]}) == len(jobs) + len(twins) == STUDY.count[table](scale)
    for job in jobs:
        make_experiment(job.arguments["experiment"])
        json.dumps(job.arguments)
    assert {job.arguments["twin"] for job in jobs} - {None} == {twin.name for twin in twins}
    for twin in twins:
        assert make_experiment(twin.arguments["experiment"]).method["name"] == "map"


@pytest.mark.parametrize("scale", SCALES)
def test_a_twin_is_the_same_network_in_every_table(scale: str) -> None:
    every = [twin for table in STUDY.table for twin in adversarial_jobs.twins_of(table, scale)]
    assert len({twin.name for twin in every}) == len({json.dumps(twin.arguments) for twin in every}) > 0


def test_settings_differ_from_the_tables_in_one_thing() -> None:
    settings = adversarial_rows.SETTINGS["cpu"]
    bases = {"lenet5": adversarial_rows.SCRATCH["cpu"]["mnist-lenet5"].method}
    bases["resnet8"] = settings["resnet8-first-0.05"].method
    for key, case in settings.items():
        base = bases[key.split("-")[0]]
        assert len([name for name in base if base[name] != case.method[name]]) == (key != "resnet8-first-0.05"), key


def test_the_authors_numbers() -> None:
    case = adversarial_rows.SCRATCH["paper"]["cifar10-resnet20"]
    method = make_experiment(adversarial_rows.experiment_for(case, "as")).method
    attack = make_attack(method["noise"])
    assert (attack.steps, attack.step_size, attack.weight, attack.radius) == (5, 0.02, 0.8, None)
    assert (method["lr"], method["prior"], method["std_init"], method["temperature"]) == (0.01, 0.15, 0.15, 0.01)
    training = make_experiment(adversarial_rows.experiment_for(case, "bbb")).training
    assert (training.epochs, training.batch_size, training.milestones) == (200, 100, [80, 140, 180])


def test_the_longer_training_takes_as_many_passes() -> None:
    case = adversarial_rows.SCRATCH["cpu"]["mnist-lenet5"]
    plain, long, attacked = (make_experiment(adversarial_rows.experiment_for(case, v)) for v in ("bbb", "long", "as"))
    attack = make_attack(attacked.method["noise"])
    assert long.training.epochs == plain.training.epochs * (attack.steps + 2)
    assert attacked.training.epochs == plain.training.epochs


@pytest.mark.parametrize("scale", SCALES)
def test_every_network_has_a_curve_of_single_draws(scale: str) -> None:
    for table in (1, 2, 4):
        for job in adversarial_jobs.jobs_of(table, scale):
            training = make_experiment(job.arguments["experiment"]).training
            assert (training.validation >= 100, training.validation_draws) == (True, 1)


def test_the_sweep_shares_networks_with_table_1() -> None:
    sweep, first = adversarial_jobs.jobs_of(4, "cpu"), adversarial_jobs.jobs_of(1, "cpu")
    shared = {job.name for job in sweep} & {job.name for job in first}
    assert shared == {"scratch-mnist-lenet5-bbb", "scratch-mnist-lenet5-as"}
    weights = [make_experiment(c.arguments["experiment"]).method["noise"] for c in sweep]
    assert [0.0 if w == "weights" else w["weight"] for w in weights] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_fine_tuned_network_is_trained_measured_and_tabled(tmp_path: Path) -> None:
    """From the twin in the folder beside it, that both variants share."""
    found = {job.name: record for job, record in adversarial_jobs.run_table(2, tmp_path, scale="smoke", workers=1)}
    (twin,) = (name for name in found if name.startswith("twin"))
    assert found[twin]["numbers"]["accuracy"] > 30
    record = found["tuned-digits-convnet-as"]
    numbers, accuracies = record["numbers"], torch.tensor(record["accuracies"])
    assert numbers["lowest"] == pytest.approx(100 * float(accuracies.min()))
    assert numbers["highest"] == pytest.approx(100 * float(accuracies.max()))
    for name in ("ensembled", "lowest", "highest"):
        assert record["intervals"][name][0] <= numbers[name] <= record["intervals"][name][1]
        right = adversarial_jobs.unpacked(record["hits"])[name]
        assert 100 * float(right.mean()) == pytest.approx(numbers[name])
    assert set(numbers["retained"]) == {"0.2", "0.4", "0.6", "0.8", "1"}
    assert len(record["curve"]) == 2
    assert record["experiment"]["model"]["weights"] == "twin", "no path of this machine"
    table = STUDY.table[2](found, "smoke")
    assert [row[0].removeprefix("digits, convnet ") for row in table.rows] == [*adversarial_rows.VARIANTS.values()]
    assert table.rows[-1][2].startswith(f"{numbers['lowest']:.2f} (")
    assert table.rows[-1][table.columns.index("mean of draws")].startswith(f"{numbers['mean']:.2f} (")
    assert all(len(row) == len(table.columns) for row in table.rows)
    before = (tmp_path / "networks" / f"{twin}.json").stat().st_mtime_ns
    (tmp_path / "networks" / "tuned-digits-convnet-as.json").unlink()
    again = {job.name: r for job, r in adversarial_jobs.run_table(2, tmp_path, scale="smoke", workers=1)}
    unlike = {"wall"}
    assert {k: v for k, v in again["tuned-digits-convnet-as"].items() if k not in unlike} == {
        k: v for k, v in record.items() if k not in unlike
    }, "a finished run is not trained again"
    assert (tmp_path / "networks" / f"{twin}.json").stat().st_mtime_ns == before


def some_record(lowest: list[int], highest: list[int], ensembled: list[int]) -> dict[str, Any]:
    hits = {"lowest": lowest, "highest": highest, "ensembled": ensembled}
    numbers = {name: 100 * sum(right) / len(right) for name, right in hits.items()}
    return {
        "numbers": numbers,
        "draws": 7,
        "case": "some",
        "variant": "bbb",
        "hits": adversarial_jobs.packed({name: torch.tensor(right) for name, right in hits.items()}),
    }


def test_differences_are_paired_image_by_image() -> None:
    """Two networks that are right about the same images but one differ by that one, however hard the images are."""
    plain = some_record([0, 1] * 50, [1, 1, 1, 0] * 25, [1] * 100)
    ours = some_record([1] + [1, 1] + [0, 1] * 48 + [1], [1, 1, 1, 0] * 25, [1] * 99 + [0])
    found = adversarial_sampling.differences(ours, plain)
    assert list(found) == ["lowest", "highest", "spread", "ensembled"]
    right = torch.tensor([1] + [1, 1] + [0, 1] * 48 + [1]).double()
    direct = paired_difference(100 * right, 100 * torch.tensor([0, 1] * 50).double())
    assert found["lowest"] == f"{direct.value:+.2f} ({direct.low:+.2f} … {direct.high:+.2f})"
    assert found["highest"] == "+0.00 (+0.00 … +0.00)"
    assert found["spread"].startswith(f"{-direct.value:+.2f} (")
    assert found["ensembled"].startswith("-1.00 (-3.00 … ")


def test_tables_of_differences_and_settings_show_what_is_there() -> None:
    plain, ours = some_record([0, 1], [1, 1], [1, 1]), some_record([1, 1], [1, 1], [1, 1])
    names = [job.name for table in ("differences", "settings") for job in adversarial_jobs.jobs_of(table, "smoke")]
    records = {name: dict(plain if name.endswith(("bbb", "long")) else ours) for name in names}
    table = STUDY.table["differences"](records, "smoke")
    assert len(table.rows) == 2 * 2 + 5, "from scratch and fine-tuned against two, and five λ"
    assert all(row[1].startswith("+50.00 (") and row[3].startswith("-50.00 (") for row in table.rows)
    settings = STUDY.table["settings"](records, "smoke")
    assert settings.rows[0][:5] == ["digits, convnet, last layer random", 7, "50.00", "100.00", table.rows[0][1]]
    assert all(len(row) == len(settings.columns) for row in settings.rows)
    del records["scratch-digits-convnet-bbb"]["hits"]
    with pytest.raises(ValueError, match="is of an earlier version"):
        STUDY.table["differences"](records, "smoke")
    records["scratch-digits-convnet-bbb"] = some_record([0, 1], [1, 1], [1, 1])
    del records["setting-convnet-last-as"], records["scratch-digits-convnet-as"]
    assert STUDY.table["settings"](records, "smoke").rows == []
    assert len(STUDY.table["differences"](records, "smoke").rows) == 2 + 4


def test_settings_with_a_longer_training_have_two_rows() -> None:
    plain, ours = some_record([0, 1], [1, 1], [1, 1]), some_record([1, 1], [1, 1], [1, 1])
    records = {f"setting-resnet8-first-0.05-{v}": plain for v in ("bbb", "long")}
    table = STUDY.table["settings"]({**records, "setting-resnet8-first-0.05-as": ours}, "cpu")
    title = "CIFAR-10 (5,000 images) ResNet8 fine-tuned, σ from 0.05"
    assert [row[0] for row in table.rows] == [title, f"{title}, BBB with as many passes"]


def test_intervals_of_shares_are_wilsons() -> None:
    """Against statsmodels' and R's, as printed in textbooks: 8 of 10, and none of 20."""
    assert adversarial_sampling.wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert adversarial_sampling.wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


@pytest.mark.parametrize("size", [1, 7, 8, 10_000])
def test_hits_are_packed_without_loss(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    hits = {name: torch.randint(2, (size,), generator=generator).double() for name in adversarial_jobs.STORED}
    stored = json.loads(json.dumps(adversarial_jobs.packed(hits)))
    found = adversarial_jobs.unpacked(stored)
    assert all(torch.equal(found[name], hits[name]) for name in hits)
    assert torch.equal(found["spread"], hits["highest"] - hits["lowest"])


def test_figures_are_drawn_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    lines: list[list[tuple[list[float], list[float]]]] = []
    save_figure = Figure.savefig

    def seen(figure: Any, *args: Any, **options: Any) -> None:
        lines.append([(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines])
        save_figure(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", seen)

    def record(at: float) -> dict[str, Any]:
        numbers = {"lowest": at, "highest": at + 2, "ensembled": at + 3, "mean": at + 1}
        intervals = {name: [value - 1, value + 1] for name, value in numbers.items()}
        return {"numbers": numbers, "intervals": intervals, "curve": [0.5, 0.75, at / 100]}

    jobs = [job for table in (1, 4) for job in adversarial_jobs.jobs_of(table, "cpu")]
    records = {job.name: record(70.0 + index) for index, job in enumerate(jobs)}
    drawn = adversarial_sampling.draw_figures(records, "cpu", tmp_path)
    assert [p.name for p in drawn] == [
        "curves-scratch-mnist-lenet5.png",
        "curves-scratch-cifar10-resnet8.png",
        "lambda.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    plain, long, attacked = lines[0]
    assert plain[0] == long[0] == [1, 2, 3]
    assert attacked[0] == [7, 14, 21], "an epoch with the attack takes seven passes"
    assert plain[1] == pytest.approx([50, 25, 100 - records["scratch-mnist-lenet5-bbb"]["curve"][-1] * 100])
    sweep = adversarial_jobs.sweep_jobs("cpu")
    lowest = [records[job.name]["numbers"]["lowest"] for job in sweep.values()]
    assert lines[2][2] == ([0, 0.2, 0.4, 0.6, 0.8, 1.0], lowest)
    del records["lambda-0.4"]
    assert len(adversarial_sampling.draw_figures(records, "cpu", tmp_path)) == 2


# -- where a network begins ---------------------------------------------------------------------------------------


def convnet() -> torch.nn.Module:
    return build_model("convnet", inputs=[1, 8, 8], classes=10, channels=[4], hidden=[8], batch_norm=True)


def test_a_saved_posterior_gives_means_and_running_statistics(tmp_path: Path) -> None:
    trained = BBB(convnet(), data_size=10, std_init=0.1)
    for name, buffer in trained.model.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(0.25)
    save(trained, tmp_path / "model.safetensors")
    for where in (tmp_path, tmp_path / "model.safetensors"):
        fresh = convnet()
        load_weights_(fresh, str(where), "convnet")
        for name, tensor in trained.model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], tensor), name


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(MAP(convnet(), data_size=10), path)
    wider = build_model("convnet", inputs=[1, 8, 8], classes=10, channels=[6], hidden=[8], batch_norm=True)
    with pytest.raises(FileFormatError, match="is of another network"):
        load_weights_(wider, str(path), "convnet")
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere\. Give a finished run's folder"):
        load_weights_(convnet(), str(tmp_path / "nowhere"), "convnet")
    save(Ensemble([MAP(convnet(), data_size=10) for _ in range(2)]), tmp_path / "e.safetensors")
    with pytest.raises(UnsupportedModelError, match="is an ensemble"):
        load_weights_(convnet(), str(tmp_path / "e.safetensors"), "convnet")


def test_public_weights_say_where_to_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="resnet20 and resnet56, not for lenet5"):
        load_weights_(convnet(), "public", "lenet5")
    with pytest.raises(FileNotFoundError, match=r"weights.resnet20-cifar10\.safetensors: put the weights of github"):
        load_weights_(convnet(), "public", "resnet20")


def test_training_on_part_of_the_data() -> None:
    tables = {"training": {"examples": 200, "validation": 100, "seed": 3}}
    prepared = prepare(make_experiment(tables))
    counts = prepared.loader.split.y.bincount()
    assert counts.sum() == 200 == prepared.posterior.data_size
    assert counts.min() >= 18, "every class at its share"
    again = prepare(make_experiment(tables))
    assert torch.equal(again.loader.split.y, prepared.loader.split.y)
    with pytest.raises(ValueError, match=r"training\.examples=99999: there are"):
        prepare(make_experiment({"training": {"examples": 99999}}))
