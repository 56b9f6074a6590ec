"""The rows of Osawa et al. (2019): what each one trains, how it is measured, and the table they end in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT
from torch import nn

import credo
from credo.evaluate import misclassification_auroc
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.runs import Run
from credo.methods import MAP
from credo.predict import predict
from credo.training import train
from reproductions.jobs import of_seed
from reproductions.studies import STUDIES
from reproductions.study import SCALES
from reproductions.vogn import rows as vogn_rows
from reproductions.vogn import search
from reproductions.vogn import tables as vogn
from reproductions.vogn.trials import SEARCHES


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_is_an_experiment_that_can_be_made(scale: str) -> None:
    rows = tuple(vogn_rows.NETWORKS)
    jobs = vogn.table_1_jobs(scale, rows)
    assert len({job.name for job in jobs}) == len(jobs) == STUDIES["vogn"].tables["1"].count(scale, rows=rows)
    for job in jobs:
        experiment = make_experiment(job.arguments["experiment"])
        assert experiment.training.validation == 0, "all training images, as in the paper"
        assert experiment.data["name"] == ("digits" if scale == "smoke" else "cifar10")
        json.dumps(job.arguments)
    assert {(job.arguments["network"], job.arguments["optimiser"]) for job in jobs} >= set(vogn_rows.PRINTED)


def test_which_rows_are_run() -> None:
    lenet = vogn_rows.chosen_rows("cpu")
    assert {network for network, _ in lenet} == {"lenet5"} == {n for n, _ in vogn_rows.chosen_rows("smoke")}
    assert {network for network, _ in vogn_rows.chosen_rows("paper")} == set(vogn_rows.NETWORKS)
    chosen = vogn_rows.chosen_rows("cpu", ("resnet18-vogn", "lenet5"))
    assert chosen == [*lenet, ("resnet18", "vogn")], "the table's order, not the order of asking"
    with pytest.raises(ValueError, match=r"Unknown row 'lenet5-vgn'\. Did you mean 'lenet5-vogn'"):
        vogn_rows.chosen_rows("cpu", ("lenet5-vgn",))


def test_the_papers_numbers_for_vogn() -> None:
    """Those of its published configurations; `curvature.decay` is its β₂."""
    cases: dict[str, dict[str, Any]] = {
        "lenet5": {"prior_precision": 100.0, "draws": 6, "temperature": {"start": 0.1, "steps": 11_719, "to": 1.0}},
        "alexnet": {"prior_precision": 0.5, "draws": 3, "temperature": {"start": 0.05, "steps": 1954, "to": 0.1}},
        "resnet18": {"prior_precision": 50.0, "draws": 5, "temperature": 0.1},
    }
    for network, wanted in cases.items():
        experiment = make_experiment(vogn_rows.experiment_for(network, "vogn", "paper"))
        common = {
            "lr": 1e-4,
            "momentum": credo.Momentum().config(),
            "curvature": credo.Curvature(1e-3).config(),
            "damping": 1e-3,
        }
        assert {key: experiment.method.get(key) for key in (*wanted, *common)} == {**wanted, **common}
        assert experiment.training.batch_size == (128 if network == "lenet5" else 256)
        assert experiment.training.augment == ("none" if network == "lenet5" else "flip-crop")
    assert make_experiment(vogn_rows.experiment_for("resnet18", "vogn", "paper")).model["stem"] == "imagenet"


def test_the_larger_networks_with_preset_cpu_fit_their_fewer_epochs() -> None:
    """Warm-ups keep their fraction of the training; IVON's curvature forgets its initial value."""
    searched = {(network, optimiser) for network, search in SEARCHES.items() for optimiser in search.settings}
    rows = vogn_rows.chosen_rows("cpu", tuple(vogn_rows.NETWORKS))
    larger = [row for row in rows if row[0] != "lenet5" and row not in searched]
    warm = 0
    for network, optimiser in larger:
        short, whole = (make_experiment(vogn_rows.experiment_for(network, optimiser, s)) for s in ("cpu", "paper"))
        steps = short.training.epochs * -(-vogn_rows.TRAIN_SIZE // short.training.batch_size)
        fraction = short.training.epochs / whole.training.epochs
        assert short.training.epochs == 32
        if isinstance(whole.method.get("temperature"), dict):
            warm += 1
            planned, made = (one.method["temperature"]["steps"] for one in (whole, short))
            assert made == pytest.approx(planned * fraction, abs=1)
            assert made <= steps
        if optimiser == "ivon":
            assert steps * (1 - short.method["curvature"]["decay"]) == pytest.approx(2, rel=0.02)
            assert whole.method["curvature"]["decay"] == 0.99999
    assert warm == 2


@pytest.mark.parametrize("network", ["lenet5", "alexnet"])
@pytest.mark.parametrize("optimiser", ["kfac", "noisy-kfac"])
def test_k_fac_steps_are_bounded_on_a_cpu_only(network: str, optimiser: str) -> None:
    paper, cpu = (make_experiment(vogn_rows.experiment_for(network, optimiser, s)).method for s in ("paper", "cpu"))
    assert paper["clip"] is None
    assert cpu["clip"] == 1e-2


def test_weight_decay_is_given_as_a_prior() -> None:
    """The gradient of the prior's term is weight_decay·w, which is what torch's Adam adds to the gradient."""
    net = nn.Linear(3, 2)
    settings = vogn_rows.PAPER["lenet5"]["adam"]["method"]
    posterior = MAP(net, data_size=vogn_rows.TRAIN_SIZE, prior=settings["prior"])
    assert posterior.prior is not None
    weights = posterior.layout.flatten(dict(net.named_parameters())).detach().requires_grad_()
    (-posterior.prior.log_prob(weights) / posterior.data_size).backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, 0.01 * weights.detach(), rtol=1e-3, atol=1e-6)


def small(network: str, optimiser: str) -> dict[str, Any]:
    (job,) = vogn.table_1_jobs("smoke", (f"{network}-{optimiser}",))
    return {**job.arguments, "draws": 4}


@pytest.mark.slow
def test_a_row_is_measured_as_it_was_trained(tmp_path: Path) -> None:
    arguments = small("lenet5", "vogn")
    record = vogn.train_job(arguments, tmp_path / "run")
    experiment = make_experiment(arguments["experiment"])
    prepared = prepare(experiment)
    for _ in train(prepared.posterior, prepared.loader, epochs=2, schedule=experiment.training.make_schedule()):
        pass
    test = predict(prepared.posterior, prepared.test_batches(), draws=4)
    on_train = predict(prepared.posterior, in_order(prepared.dataset.train), draws=4)
    assert on_train.targets is not None
    assert test.targets is not None
    assert test.log_likelihood is not None
    numbers = record["numbers"]
    train_accuracy = 100 * (on_train.labels == on_train.targets).double().mean().item()
    assert numbers["train_accuracy"] == pytest.approx(train_accuracy, abs=1e-9)
    assert numbers["nll"] == pytest.approx(-test.log_likelihood.double().mean().item(), rel=1e-6)
    assert numbers["auroc"] == pytest.approx(misclassification_auroc(test.probs, test.targets), rel=1e-6)
    assert numbers["epochs"] == 2
    assert 0 < numbers["seconds_per_epoch"] < record["seconds"]
    assert (record["network"], record["optimiser"], record["draws"]) == ("lenet5", "vogn", 4)


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", ["vogn", "ivon"])
def test_a_row_resumes_from_its_checkpoint(tmp_path: Path, optimiser: str) -> None:
    """Killed after the first epoch, or after training and before the record."""
    arguments = small("lenet5", optimiser)
    whole = vogn.train_job(arguments, tmp_path / "whole")
    broken = Run(tmp_path / "broken").train(make_experiment(arguments["experiment"]), draws=4)
    next(broken)
    broken.close()  # type: ignore[attr-defined]
    for _ in range(2):
        record = vogn.train_job(arguments, tmp_path / "broken")
        for timing in ("seconds", "seconds_per_epoch"):
            record.pop(timing, None)
            record["numbers"].pop(timing, None)
        expected = {**whole, "numbers": {k: v for k, v in whole["numbers"].items() if k != "seconds_per_epoch"}}
        expected.pop("seconds")
        assert record == expected


OURS = {"train_accuracy": 70.123, "accuracy": 67.5, "nll": 0.9123, "epochs": 50, "seconds_per_epoch": 5.5}


def record_for(network: str, optimiser: str) -> dict[str, Any]:
    numbers = {**OURS, "ece": 0.0213, "auroc": 0.8}
    experiment = vogn_rows.experiment_for(network, optimiser, "cpu")
    return {"numbers": numbers, "draws": 10, "arguments": {"experiment": experiment}}


def test_ours_beside_the_papers() -> None:
    wanted = [("lenet5", "ogn"), ("lenet5", "vogn"), ("resnet18", "adam")]
    records = {f"{network}-{optimiser}": record_for(network, optimiser) for network, optimiser in wanted}
    table = vogn.table_1(records, "cpu")
    assert table.columns[:5] == ["row", "train / val % paper", "train / val %", "val NLL paper", "val NLL"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    vogn_row, ogn_row, resnet_row = table.rows
    ours = ["70.12 / 67.50", "0.912", "50", "5.50", "0.021", "0.800"]
    theirs = ["70.79 / 67.32", "0.938", "210", "18.33", "0.046", "0.800"]
    assert vogn_row == [
        "LeNet-5 (no DA) VOGN",
        *(cell for pair in zip(theirs, ours, strict=True) for cell in pair),
        "1",
    ]
    assert (ogn_row[0], ogn_row[1:-1:2], ogn_row[2::2]) == ("LeNet-5 (no DA) OGN", [None] * 6, ours)
    assert resnet_row[:2] == ["ResNet-18 Adam", "97.74 / 86.00"]
    assert not any("smoke" in note for note in table.notes)


def test_seeds_have_a_mean_a_deviation_and_leads_paired_by_seed() -> None:
    records = {}
    for seed, (first, second) in enumerate([(70.0, 69.0), (71.0, 69.5), (72.0, 71.5)]):
        for optimiser, accuracy in (("vogn", first), ("adam", second), ("ogn", first)):
            record = record_for("lenet5", optimiser)
            record["numbers"]["accuracy"] = accuracy
            if optimiser != "ogn" or seed:
                records[of_seed(f"lenet5-{optimiser}", seed)] = record
    table = vogn.table_1(records, "cpu")
    cells = {row[0].split()[-1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert cells["VOGN"]["train / val %"] == "70.12 ± 0.00 / 71.00 ± 1.00"
    assert [cells[name]["seeds"] for name in ("Adam", "VOGN", "OGN")] == ["3", "3", "2"]
    # Differences 1, 1.5 and 0.5: 1 ± 4.303 · 0.5/√3.
    assert "VOGN minus Adam, paired by seed, 95 % t intervals: points +1.00 (-0.24 … +2.24)" in table.notes[1]
    assert len(table.notes) == 2, "two seeds of OGN are too few"


# -- the search of settings -----------------------------------------------------------------------------------


def test_trials_are_trained_on_other_images_than_they_are_measured_on() -> None:
    (stage,) = search.search_stages("cpu")
    for job in stage.jobs:
        training = make_experiment(job.arguments["experiment"]).training
        assert (training.validation, training.seed) == (5000, 0), job.name
    for network, found in SEARCHES.items():
        counts = {optimiser: len(settings) for optimiser, settings in found.settings.items()}
        assert counts.keys() == found.chosen.keys() == found.common.keys()
        assert len({count for optimiser, count in counts.items() if optimiser != "adam"}) == 1, network
        assert counts["adam"] == max(counts.values()), "the baseline has as many trials"


@pytest.mark.parametrize(("network", "optimiser"), [(n, o) for n, found in SEARCHES.items() for o in found.settings])
def test_a_row_has_the_settings_of_its_best_trial(network: str, optimiser: str) -> None:
    records = STUDIES["vogn"].tables["search"].records(ROOT / "results/vogn/cpu", "cpu")
    best = search.best(records, network, optimiser)
    if best is None:
        assert SEARCHES[network].chosen[optimiser] == 1, "the setting from before the search"
        return
    assert SEARCHES[network].chosen[optimiser] == best.number
    experiment = vogn_rows.experiment_for(network, optimiser, "cpu")
    assert experiment["method"] == records[best.name]["arguments"]["experiment"]["method"]


@pytest.mark.slow
def test_a_trial_is_measured_on_its_held_out_images(tmp_path: Path) -> None:
    job = next(job for job in search.search_stages("smoke")[0].jobs if job.name == "lenet5-vogn-1")
    record = search.trial_job(job.arguments, tmp_path / "run")
    experiment = make_experiment(job.arguments["experiment"])
    prepared = prepare(experiment)
    options = experiment.training
    for _ in train(prepared.posterior, prepared.loader, epochs=options.epochs, schedule=options.make_schedule()):
        pass
    assert prepared.validation is not None
    held_out = predict(prepared.posterior, prepared.validation, draws=job.arguments["draws"])
    assert held_out.targets is not None
    assert len(held_out.targets) + len(prepared.loader.split) == len(prepared.dataset.train)
    accuracy = 100 * (held_out.labels == held_out.targets).double().mean().item()
    assert record["numbers"]["accuracy"] == pytest.approx(accuracy)
    assert search.trial_job(job.arguments, tmp_path / "run")["numbers"] == record["numbers"], "resumed at its end"


def test_the_trial_with_the_lowest_nll_is_chosen() -> None:
    names = [trial.name for trial in search.trials("lenet5", "ivon")]
    records = {
        name: {
            "numbers": {"accuracy": 60.0, "nll": 1.0 - 0.1 * (number == 2), "ece": 0.01},
            "arguments": {"experiment": vogn_rows.experiment_for("lenet5", "ivon", "cpu", trial=number)},
        }
        for number, name in enumerate(names, 1)
    }
    table = search.search_table(records, "cpu")
    assert [row[-1] for row in table.rows] == ["", "chosen", "", "", "", ""]
    assert table.rows[0][1:4] == [
        "lr 0.2, weight_decay 0.0002, curvature init 0.5 / decay 0.99999, clip none",
        "30",
        "60.00",
    ]
    del records[names[0]]
    assert not any(row[-1] for row in search.search_table(records, "cpu").rows), "not before all are there"


def test_a_table_without_records() -> None:
    table = vogn.table_1({}, "smoke")
    assert table.rows == []
    assert "digits" in table.notes[-1]
