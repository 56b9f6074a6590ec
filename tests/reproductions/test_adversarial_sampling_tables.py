"""The study of Zhang et al. (2022): its networks, its tables and figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.evaluate import paired_difference
from credo.experiments.config import make_experiment
from credo.methods.adversarial_sampling import make_attack
from reproductions.adversarial_sampling import networks, rows, tables
from reproductions.studies import STUDIES
from reproductions.study import SCALES

STUDY = STUDIES["adversarial-sampling"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", STUDY.tables)
def test_every_network_is_an_experiment_that_can_be_made(scale: str, table: str) -> None:
    jobs, baselines = networks.jobs_of(table, scale), networks.baselines_of(table, scale)
    names = {job.name for job in [*baselines, *jobs]}
    assert len(names) == len(jobs) + len(baselines) == STUDY.tables[table].count(scale)
    for job in jobs:
        make_experiment(job.arguments["experiment"])
        json.dumps(job.arguments)
    assert {job.arguments["twin"] for job in jobs} - {None} == {job.name for job in baselines}
    for job in baselines:
        assert make_experiment(job.arguments["experiment"]).method["name"] == "map"


@pytest.mark.parametrize("scale", SCALES)
def test_a_baseline_is_the_same_network_in_every_table(scale: str) -> None:
    every = [job for table in STUDY.tables for job in networks.baselines_of(table, scale)]
    assert len({job.name for job in every}) == len({json.dumps(job.arguments) for job in every}) > 0


def test_settings_differ_from_the_tables_in_one_thing() -> None:
    settings = rows.SETTINGS["cpu"]
    bases = {"lenet5": rows.SCRATCH["cpu"]["mnist-lenet5"].method}
    bases["resnet8"] = settings["resnet8-first-0.05"].method
    bases["resnet20"] = rows.TUNED["cpu"]["cifar10-resnet20"].method
    for key, case in settings.items():
        base = bases[key.split("-")[0]]
        assert len([name for name in base if base[name] != case.method[name]]) == (key != "resnet8-first-0.05"), key


def test_the_authors_numbers() -> None:
    case = rows.SCRATCH["paper"]["cifar10-resnet20"]
    method = make_experiment(rows.experiment_for(case, "as")).method
    attack = make_attack(method["noise"])
    assert (attack.steps, attack.step_size, attack.weight, attack.radius) == (5, 0.02, 0.8, None)
    assert (method["lr"], method["prior"], method["init"]["std"], method["temperature"]) == (0.01, 0.15, 0.15, 0.01)
    training = make_experiment(rows.experiment_for(case, "bbb")).training
    assert (training.epochs, training.batch_size, training.milestones) == (200, 100, [80, 140, 180])


def test_the_longer_training_takes_as_many_passes() -> None:
    case = rows.SCRATCH["cpu"]["mnist-lenet5"]
    plain, long, attacked = (make_experiment(rows.experiment_for(case, v)) for v in ("bbb", "long", "as"))
    attack = make_attack(attacked.method["noise"])
    assert long.training.epochs == plain.training.epochs * (attack.steps + 2)
    assert attacked.training.epochs == plain.training.epochs


@pytest.mark.parametrize("scale", SCALES)
def test_every_network_has_a_curve_of_single_draws(scale: str) -> None:
    for table in ("1", "2", "4"):
        for job in networks.jobs_of(table, scale):
            training = make_experiment(job.arguments["experiment"]).training
            assert (training.validation >= 100, training.validation_draws) == (True, 1)


def test_the_sweep_shares_networks_with_table_1() -> None:
    sweep, first = networks.jobs_of("4", "cpu"), networks.jobs_of("1", "cpu")
    shared = {job.name for job in sweep} & {job.name for job in first}
    assert shared == {"scratch-mnist-lenet5-bbb", "scratch-mnist-lenet5-as"}
    weights = [make_experiment(job.arguments["experiment"]).method["noise"] for job in sweep]
    assert [0.0 if w == "weights" else w["weight"] for w in weights] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.mark.slow
def test_a_fine_tuned_network_is_trained_measured_and_tabled(tmp_path: Path) -> None:
    """From the baseline in the folder beside it, which both variants share."""
    table_2 = STUDY.tables["2"]
    found = {job.name: record for job, record in table_2.run(tmp_path, scale="smoke", workers=1)}
    (baseline,) = (name for name in found if name.startswith("twin"))
    assert found[baseline]["numbers"]["accuracy"] > 30
    record = found["tuned-digits-convnet-as"]
    numbers, accuracies = record["numbers"], torch.tensor(record["accuracies"])
    assert numbers["lowest"] == pytest.approx(100 * float(accuracies.min()))
    assert numbers["highest"] == pytest.approx(100 * float(accuracies.max()))
    for name in ("ensembled", "lowest", "highest"):
        assert record["intervals"][name][0] <= numbers[name] <= record["intervals"][name][1]
        right = networks.unpacked(record["hits"])[name]
        assert 100 * float(right.mean()) == pytest.approx(numbers[name])
    assert set(numbers["retained"]) == {"0.2", "0.4", "0.6", "0.8", "1"}
    assert len(record["curve"]) == 2
    assert record["experiment"]["model"]["weights"] == "twin", "no path of this machine"
    table = table_2.finish(found, "smoke")
    assert [row[0].removeprefix("digits, convnet ") for row in table.rows] == [*rows.VARIANTS.values()]
    assert table.rows[-1][2].startswith(f"{numbers['lowest']:.2f} (")
    assert table.rows[-1][table.columns.index("mean of draws")].startswith(f"{numbers['mean']:.2f} (")
    assert all(len(row) == len(table.columns) for row in table.rows)
    before = (tmp_path / "networks" / f"{baseline}.json").stat().st_mtime_ns
    (tmp_path / "networks" / "tuned-digits-convnet-as.json").unlink()
    again = {job.name: record for job, record in table_2.run(tmp_path, scale="smoke", workers=1)}
    unlike = {"wall"}
    assert {k: v for k, v in again["tuned-digits-convnet-as"].items() if k not in unlike} == {
        k: v for k, v in record.items() if k not in unlike
    }, "a finished run is not trained again"
    assert (tmp_path / "networks" / f"{baseline}.json").stat().st_mtime_ns == before


def some_record(lowest: list[int], highest: list[int], ensembled: list[int]) -> dict[str, Any]:
    hits = {"lowest": lowest, "highest": highest, "ensembled": ensembled}
    numbers = {name: 100 * sum(right) / len(right) for name, right in hits.items()}
    return {
        "numbers": numbers,
        "draws": 7,
        "case": "some",
        "variant": "bbb",
        "hits": networks.packed({name: torch.tensor(right) for name, right in hits.items()}),
    }


def test_differences_are_paired_image_by_image() -> None:
    """Two networks that are right about the same images but one differ by that one, however hard the images are."""
    plain = some_record([0, 1] * 50, [1, 1, 1, 0] * 25, [1] * 100)
    ours = some_record([1] + [1, 1] + [0, 1] * 48 + [1], [1, 1, 1, 0] * 25, [1] * 99 + [0])
    found = tables.differences(ours, plain)
    assert list(found) == ["lowest", "highest", "spread", "ensembled"]
    right = torch.tensor([1] + [1, 1] + [0, 1] * 48 + [1]).double()
    direct = paired_difference(100 * right, 100 * torch.tensor([0, 1] * 50).double())
    assert found["lowest"] == f"{direct.value:+.2f} ({direct.low:+.2f} … {direct.high:+.2f})"
    assert found["highest"] == "+0.00 (+0.00 … +0.00)"
    assert found["spread"].startswith(f"{-direct.value:+.2f} (")
    assert found["ensembled"].startswith("-1.00 (-3.00 … ")


def test_tables_of_differences_and_settings_show_what_is_there() -> None:
    plain, ours = some_record([0, 1], [1, 1], [1, 1]), some_record([1, 1], [1, 1], [1, 1])
    names = [job.name for table in ("differences", "settings") for job in networks.jobs_of(table, "smoke")]
    records = {name: dict(plain if name.endswith(("bbb", "long")) else ours) for name in names}
    table = STUDY.tables["differences"].finish(records, "smoke")
    assert len(table.rows) == 2 * 2 + 5, "from scratch and fine-tuned against two, and five λ"
    assert all(row[1].startswith("+50.00 (") and row[3].startswith("-50.00 (") for row in table.rows)
    settings = STUDY.tables["settings"].finish(records, "smoke")
    assert settings.rows[0][:5] == ["digits, convnet, last layer random", 7, "50.00", "100.00", table.rows[0][1]]
    assert all(len(row) == len(settings.columns) for row in settings.rows)
    del records["scratch-digits-convnet-bbb"]["hits"]
    with pytest.raises(ValueError, match="is of an earlier version"):
        STUDY.tables["differences"].finish(records, "smoke")
    records["scratch-digits-convnet-bbb"] = some_record([0, 1], [1, 1], [1, 1])
    del records["setting-convnet-last-as"], records["scratch-digits-convnet-as"]
    assert STUDY.tables["settings"].finish(records, "smoke").rows == []
    assert len(STUDY.tables["differences"].finish(records, "smoke").rows) == 2 + 4


def test_settings_with_a_longer_training_have_two_rows() -> None:
    plain, ours = some_record([0, 1], [1, 1], [1, 1]), some_record([1, 1], [1, 1], [1, 1])
    records = {f"setting-resnet8-first-0.05-{v}": plain for v in ("bbb", "long")}
    table = STUDY.tables["settings"].finish({**records, "setting-resnet8-first-0.05-as": ours}, "cpu")
    title = "CIFAR-10 (5,000 images) ResNet8 fine-tuned, σ from 0.05"
    assert [row[0] for row in table.rows] == [title, f"{title}, BBB with as many passes"]


def test_intervals_of_fractions_are_wilsons() -> None:
    """Against statsmodels' and R's, as printed in textbooks: 8 of 10, and none of 20."""
    assert tables.wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert tables.wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


@pytest.mark.parametrize("size", [1, 7, 8, 10_000])
def test_hits_are_packed_without_loss(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    hits = {name: torch.randint(2, (size,), generator=generator).double() for name in networks.STORED}
    stored = json.loads(json.dumps(networks.packed(hits)))
    found = networks.unpacked(stored)
    assert all(torch.equal(found[name], hits[name]) for name in hits)
    assert torch.equal(found["spread"], hits["highest"] - hits["lowest"])


@pytest.mark.slow
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

    jobs = [job for table in ("1", "4") for job in networks.jobs_of(table, "cpu")]
    records = {job.name: record(70.0 + index) for index, job in enumerate(jobs)}
    drawn = tables.draw_figures(records, "cpu", tmp_path)
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
    sweep = networks.sweep_jobs("cpu")
    lowest = [records[job.name]["numbers"]["lowest"] for job in sweep.values()]
    assert lines[2][2] == ([0, 0.2, 0.4, 0.6, 0.8, 1.0], lowest)
    del records["lambda-0.4"]
    assert len(tables.draw_figures(records, "cpu", tmp_path)) == 2
