"""The study of Zhang et al. (2022): its networks, its tables and figures, and what a fine-tune begins with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from credo import BBB, MAP, Ensemble, FileFormatError, UnsupportedModelError, save
from credo.experiments.config import make_experiment, prepare
from credo.experiments.reproduce import STUDIES, adversarial_rows, adversarial_sampling
from credo.experiments.reproduce.tables import SCALES
from credo.experiments.start import load_weights_
from credo.methods.adversarial import make_attack
from credo.models import build_model

STUDY = STUDIES["adversarial-sampling"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", [1, 2, 3, 4])
def test_every_network_is_an_experiment_that_can_be_made(scale: str, table: int) -> None:
    cells = adversarial_sampling.cells_of(table, scale)
    assert len({cell.name for cell in cells}) == len(cells) == STUDY.count[table](scale)
    for cell in cells:
        make_experiment(cell.arguments["experiment"])
        if cell.arguments["twin"] is not None:
            assert make_experiment(cell.arguments["twin"]).method["name"] == "map"
        json.dumps(cell.arguments)


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
        for cell in adversarial_sampling.cells_of(table, scale):
            training = make_experiment(cell.arguments["experiment"]).training
            assert (training.validation >= 100, training.validation_draws) == (True, 1)


def test_the_sweep_shares_networks_with_table_1() -> None:
    sweep, first = adversarial_sampling.cells_of(4, "cpu"), adversarial_sampling.cells_of(1, "cpu")
    shared = {cell.name for cell in sweep} & {cell.name for cell in first}
    assert shared == {"scratch-mnist-lenet5-bbb", "scratch-mnist-lenet5-as"}
    weights = [make_experiment(c.arguments["experiment"]).method["noise"] for c in sweep]
    assert [0.0 if w == "weights" else w["weight"] for w in weights] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_fine_tuned_network_is_trained_measured_and_tabled(tmp_path: Path) -> None:
    cell = next(c for c in adversarial_sampling.cells_of(2, "smoke") if c.arguments["variant"] == "as")
    record = adversarial_sampling.train_cell(cell.arguments, tmp_path / "a")
    numbers, accuracies = record["numbers"], torch.tensor(record["accuracies"])
    assert numbers["lowest"] == pytest.approx(100 * float(accuracies.min()))
    assert numbers["highest"] == pytest.approx(100 * float(accuracies.max()))
    assert record["intervals"]["ensembled"][0] <= numbers["ensembled"] <= record["intervals"]["ensembled"][1]
    assert set(numbers["retained"]) == {"0.2", "0.4", "0.6", "0.8", "1"}
    assert len(record["curve"]) == 2
    table = STUDY.table[2]({cell.name: record}, "smoke")
    assert table.rows[0][0].endswith("BBB + AS")
    assert table.rows[0][2].startswith(f"{numbers['lowest']:.2f} (")
    assert table.rows[0][table.columns.index("mean of draws")].startswith(f"{numbers['mean']:.2f} (")
    assert len(table.rows[0]) == len(table.columns)
    again = adversarial_sampling.train_cell(cell.arguments, tmp_path / "a")
    assert again == record, "a finished run is not trained again"


def test_figures_are_drawn_from_records(tmp_path: Path) -> None:
    def record(at: float) -> dict[str, Any]:
        numbers = {"lowest": at, "highest": at + 2, "ensembled": at + 3, "mean": at + 1}
        intervals = {name: [value - 1, value + 1] for name, value in numbers.items()}
        return {"numbers": numbers, "intervals": intervals, "curve": [0.5, 0.6, at / 100]}

    cells = [cell for table in (1, 4) for cell in adversarial_sampling.cells_of(table, "cpu")]
    records = {cell.name: record(70.0 + index) for index, cell in enumerate(cells)}
    drawn = adversarial_sampling.draw_figures(records, "cpu", tmp_path)
    assert [p.name for p in drawn] == [
        "curves-scratch-mnist-lenet5.png",
        "curves-scratch-cifar10-resnet8.png",
        "lambda.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
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
