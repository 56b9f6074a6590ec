"""The study of Zhang and Chen (2020): its twelve sets, and what is measured on them, on small data and few networks."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn

from credo import predict, sample_study
from credo.attacks import load_attack_set, minimal
from credo.compress import prune
from credo.data import Batches, Split
from credo.evaluate import accuracy
from credo.experiments.config import make_experiment, prepare
from credo.experiments.runs import Run
from reproductions.jobs import of_seed, run_jobs
from reproductions.studies import STUDIES
from reproductions.study import SCALES
from reproductions.weight_sampling import attack_sets, networks, paper, stages, tables

STUDY = STUDIES["weight-sampling"]


# -- several seeds --------------------------------------------------------------------------------------------


def test_leads_are_paired_by_seed() -> None:
    """ρ = −30 has 80, 81 and 85 %, the others 79, 79 and 82: differences 1, 2 and 3, half-width 4.303/√3 = 2.48."""
    records: dict[str, dict[str, Any]] = {}
    names = [job.name for job in attack_sets.set_jobs("cpu")]
    for job in stages.network_jobs("cpu"):
        accuracies = (80.0, 81.0, 85.0) if job.name == "tuned-bayesian--30" else (79.0, 79.0, 82.0)
        for seed, value in enumerate(accuracies):
            one = {split: {"mean": value} for split in ("validation", "test")}
            records[of_seed(job.name, seed)] = {"numbers": one}
            if seed == 0 or job.name in ("tuned-bayesian--30", "tuned-deterministic-0"):
                records[of_seed(f"sets-{job.name}", seed)] = {"numbers": {name: {"1": value} for name in names}}
    clean, perturbed = networks.table_1(records, "cpu"), tables.table_2(records, "cpu")
    assert "ρ=-30 +2.00 (-0.48 … +4.48), ρ=-10 +0.00 (+0.00 … +0.00)" in clean.notes[-1]
    assert perturbed.notes[-2].endswith("of 3 seeds: ρ=-30 82.0 ± 2.6, λ=0 80.0 ± 1.7."), "those with three seeds"
    assert perturbed.notes[-1].endswith("95 % t intervals: λ=0 +2.0 (-0.5 … +4.5).")
    assert perturbed.rows[-1][1] == "80.0 (81.0)", "the columns are of seed 0"


# -- the plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", STUDY.tables)
def test_jobs_can_be_made_and_have_names_of_their_own(scale: str, table: str) -> None:
    jobs = [job for stage in stages.stages_of(table, scale) for job in stage.jobs]
    assert len({job.name for job in jobs}) == len(jobs) == STUDY.tables[table].count(scale)
    for job in jobs:
        make_experiment(job.arguments["experiment"])
        json.dumps(job.arguments)


def test_the_sources_are_the_papers() -> None:
    jobs = {job.name: make_experiment(job.arguments["experiment"]) for job in attack_sets.set_jobs("cpu")}
    assert len(jobs) == 12
    assert list(jobs) == list(paper.BAYESIAN)[:-1]
    for name, experiment in jobs.items():
        architecture, _, strength = name.rpartition("-")
        widths = [int(part) for part in architecture.split("-")[1:-1]]
        assert experiment.model["hidden"] == widths
        prior = experiment.method["prior"]
        assert (0.0 if prior is None else prior["strength"]) == float(strength)
        assert (experiment.data["name"], experiment.training.validation) == ("mnist", 10_000)


@pytest.mark.parametrize("name", ["BAYESIAN", "DETERMINISTIC", "ENSEMBLES", "PRUNED"])
def test_the_papers_averages_are_those_of_its_rows(name: str) -> None:
    """A digit that was copied wrongly moves the average; the paper rounds to 0.01."""
    table: dict[str, tuple[float, ...]] = dict(getattr(paper, name))
    printed = table.pop("average")
    rows = [row for key, row in table.items() if key.startswith("fc-")]
    assert len(rows) == 12
    assert [mean(column) for column in zip(*rows, strict=True)] == pytest.approx(printed, abs=0.0101)


def test_the_control_differs_in_the_kl_alone() -> None:
    control = make_experiment(stages.control_job("cpu").arguments["experiment"]).to_dict()
    bayesian = make_experiment(networks.experiment_for("bayesian", -30.0, "tuned", "cpu")).to_dict()
    assert control["method"].pop("temperature") == 0.0
    assert bayesian["method"].pop("temperature") == 0.1
    assert control == bayesian


# -- perturbations ---------------------------------------------------------------------------------------------


def blob_network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The nearest of three points in the unit square, as a linear network that is right about most of 80 inputs."""
    torch.manual_seed(0)
    net = nn.Linear(2, 3)
    x, points = torch.rand(80, 2), torch.tensor([[0.2, 0.2], [0.8, 0.3], [0.4, 0.8]])
    with torch.no_grad():
        net.weight.copy_(8 * points)
        net.bias.copy_(-4 * points.square().sum(1))
        y = net(x).argmax(1)
    y[::8] = (y[::8] + 1) % 3
    return net, x, y


def test_only_what_is_right_is_perturbed_and_by_enough() -> None:
    net, x, y = blob_network()
    found = attack_sets.perturb(net, x, y, 0, options={"confidence": 0.5, "steps": 200, "precision": 0.05})
    with torch.no_grad():
        before, after = net(x), net(found.inputs)
    wrong = before.argmax(1) != y
    assert torch.equal(found.inputs[wrong], x[wrong])
    assert float(found.distortion[wrong].sum()) == 0.0
    assert bool(found.success.all())
    assert bool((after.argmax(1) != y).all())
    margin = after.topk(2).values.diff(dim=1).abs()[:, 0]
    reached = (~wrong) & (margin >= 0.5)
    assert reached.sum() > 0.6 * (~wrong).sum()
    direct = minimal(net, x[reached], y[reached], confidence=0.5)
    torch.testing.assert_close(found.inputs[reached], direct.inputs)
    distances = (found.inputs - x).double().flatten(1).norm(dim=1) / 2**0.5
    torch.testing.assert_close(found.distortion, distances)


def test_where_confidence_cannot_be_reached_the_boundary_is() -> None:
    net, x, y = blob_network()
    options = {"confidence": 100.0, "steps": 60, "precision": 0.05}
    found = attack_sets.perturb(net, x, y, 0, options=options)
    right = net(x).argmax(1) == y
    assert bool(found.success[right].double().mean() > 0.95)
    nearest = minimal(net, x[right], y[right], steps=60)
    torch.testing.assert_close(found.inputs[right], nearest.inputs)
    assert bool((found.queries[right] > nearest.queries).all())


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_margin_is_the_first_that_keeps_within_the_limit(tmp_path: Path) -> None:
    job = attack_sets.set_jobs("smoke")[0]
    run = networks.trained(make_experiment(job.arguments["experiment"]), tmp_path)
    network, attack = run.posterior().model, {**attack_sets.ATTACK, "images": 60}
    images = prepare(run.experiment()).validation.split.subset(range(60))
    lengths = {}
    for margin in attack["confidences"]:
        options = {**attack["options"], "confidence": margin}
        found = attack_sets.perturb(network, images.x, images.y, 0, options=options)
        lengths[margin] = 2 * float(found.distortion.mean())
    assert list(lengths.values()) == sorted(lengths.values(), reverse=True)
    for margin in (1.0, 0.25):
        chosen = attack_sets.chosen_confidence(network, run, {**attack, "limit": lengths[margin] + 1e-6})
        assert chosen == margin
    assert attack_sets.chosen_confidence(network, run, {**attack, "limit": 0.0}) == 1e-3


# -- tables on small data ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three networks, two sets, few steps; all records go into one folder, as they do for a user."""
    monkeypatch.setattr(networks, "RHOS", (-30.0, -3.0))
    monkeypatch.setattr(networks, "STRENGTHS", (0.01,))
    monkeypatch.setattr(attack_sets, "ARCHITECTURES", {"fc-10": (), "fc-200-200-10": (20,)})
    monkeypatch.setattr(attack_sets, "STRENGTHS", (0.01,))
    for module in (stages, tables):
        monkeypatch.setattr(module, "RATES", (0.0, 0.5, 0.75))
    smoke = {"data": {"name": "digits"}, "epochs": 4, "validation": 0.2}
    monkeypatch.setitem(networks._SCALE, "smoke", smoke)


def records_of(table: str, folder: Path) -> dict[str, dict[str, Any]]:
    return {job.name: record for job, record in STUDY.tables[table].run(folder, scale="smoke", workers=1)}


SETS = ["fc-10-0.01", "fc-200-200-10-0.01"]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_sets_are_files_with_provenance_and_fool_their_source(folder: Path) -> None:
    records = records_of("attacks", folder)
    assert list(records) == SETS
    for name, record in records.items():
        stored = load_attack_set(folder / "attacks" / f"{name}.safetensors")
        run = Run(folder / "attacks" / "runs" / name)
        test, network = run.dataset().test, run.posterior().model
        before, after = (network(x).argmax(1) == test.y for x in (test.x, stored.inputs))
        assert record["numbers"]["source_accuracy"] == pytest.approx(100 * float(before.double().mean()))
        assert record["numbers"]["fooled"] == pytest.approx(100 * float((~after[before]).double().mean()))
        assert record["numbers"]["fooled"] >= 99
        length = (stored.inputs - test.x).double().flatten(1).norm(dim=1) / 8
        assert record["numbers"]["distortion"] == pytest.approx(2 * float(length.mean()))
        assert stored.about["source"]["experiment"] == run.experiment().to_dict()
        assert record["provenance"] == stored.about
    table = STUDY.tables["attacks"].finish(records, "smoke")
    assert table.rows[0][0] == "FC-10 λ=0.01"
    assert table.rows[1][4] == f"{records[SETS[1]]['numbers']['distortion']:.4f}"


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_table_2_counts_single_networks_on_every_set(folder: Path) -> None:
    records = records_of("2", folder)
    for name in ("tuned-bayesian--3", "tuned-deterministic-0.01"):
        posterior = Run(folder / "table1" / "runs" / name).posterior()
        for which in SETS:
            stored = load_attack_set(folder / "attacks" / f"{which}.safetensors")
            batches = Batches(Split(stored.inputs, stored.labels), batch_size=512, shuffle=False)
            study = sample_study(posterior, batches, draws=100)
            assert records[f"sets-{name}"]["numbers"][which]["1"] == pytest.approx(100 * study.mean)
    table = STUDY.tables["2"].finish(records, "smoke")
    assert table.columns == ["made for", "ρ=-30", "ρ=-3", "λ=0.01"]
    ours = [records[f"sets-{name}"]["numbers"] for name in ("tuned-bayesian--3", "tuned-deterministic-0.01")]
    assert table.rows[0][2] == f"{ours[0][SETS[0]]['1']:.1f} (76.8)"
    assert table.rows[1][3] == f"{ours[1][SETS[1]]['1']:.1f} (49.7)"
    assert table.rows[2][2] == f"{mean(ours[0][s]['1'] for s in SETS):.1f} (83.2)"
    assert len(table.rows) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_table_3_averages_networks(folder: Path) -> None:
    records = records_of("3", folder)
    numbers = records["sets-tuned-bayesian--3"]["numbers"]
    stored = load_attack_set(folder / "attacks" / f"{SETS[0]}.safetensors")
    posterior = Run(folder / "table1" / "runs" / "tuned-bayesian--3").posterior()
    batches = Batches(Split(stored.inputs, stored.labels), batch_size=512, shuffle=False)
    together = predict(posterior, batches, draws=100, seed=0, shared_draws=True)
    assert numbers[SETS[0]]["100"] == pytest.approx(100 * accuracy(together.probs, stored.labels))
    table = STUDY.tables["3"].finish(records, "smoke")
    assert table.columns[1:] == ["N=1", "N=5", "N=10", "N=25", "N=100"]
    assert table.rows[0][5] == f"{numbers[SETS[0]]['100']:.1f} (81.2)"
    gain = mean(numbers[s]["100"] - numbers[s]["1"] for s in SETS)
    assert table.notes[-1].startswith(f"100 networks instead of one: {gain:+.1f} points")


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_table_4_measures_pruned_copies(folder: Path) -> None:
    records = records_of("4", folder)
    run = Run(folder / "table1" / "runs" / "tuned-bayesian--3")
    posterior = run.posterior()
    masks = prune(posterior, rate=0.75)
    record = records["pruned-0.75"]
    assert record["kept"] == sum(int(mask.sum()) for mask in masks.values())
    test = Batches(run.dataset().test, batch_size=512, shuffle=False)
    assert record["numbers"]["test"]["1"] == pytest.approx(100 * sample_study(posterior, test, draws=100).mean)
    assert record["file_bytes"] < 0.5 * record["unpruned_bytes"]
    assert records["pruned-0"]["file_bytes"] == pytest.approx(record["unpruned_bytes"], rel=0.05)
    table = STUDY.tables["4"].finish(records, "smoke")
    assert table.columns == ["made for", "0 %", "50 %", "75 %"]
    assert [row[0] for row in table.rows[:2]] == ["validation", "test"]
    assert table.rows[1][3] == f"{record['numbers']['test']['100']:.1f} (95.6)"
    assert table.rows[1][1].endswith(" (–)")
    share = record["file_bytes"] / record["unpruned_bytes"]
    assert table.notes[-1] == f"The file without 75 % of the weights takes {share:.3f} of the unpruned one."


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_white_box_is_stronger_than_none_and_grows(folder: Path) -> None:
    records = records_of("white-box", folder)
    names = ["tuned-bayesian--30", "tuned-bayesian--3", "tuned-deterministic-0.01", "control-bayesian--30"]
    for name in names:
        numbers = records[f"white-box-{name}"]["numbers"]
        assert numbers["0"]["1"] > numbers["0.05"]["1"] >= numbers["0.1"]["1"]
    table = STUDY.tables["white-box"].finish(records, "smoke")
    assert [row[0] for row in table.rows[:4]] == ["ρ=-30", "ρ=-3", "λ=0.01", "ρ=-30, κ=0"]
    assert [row[0] for row in table.rows[4:]] == ["ρ=-30, literal", "ρ=-3, literal", "λ=0.01, literal"]
    assert [len(row) for row in table.rows] == [len(table.columns)] * 7
    assert table.rows[3][2].endswith(" (–)")
    at_mean = mean(records["sets-tuned-bayesian--30"]["numbers"][s]["mean_weights"] for s in SETS)
    one = mean(records["sets-tuned-bayesian--30"]["numbers"][s]["1"] for s in SETS)
    assert at_mean == pytest.approx(one), "without deviations a draw is the mean"
    assert table.rows[0][3] == f"{at_mean:.1f}"
    assert "From the best deterministic network to the best Bayesian one" in table.notes[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_what_is_gone_is_made_again_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records_of("attacks", folder)
    path = folder / "attacks" / f"{SETS[0]}.safetensors"
    before = path.read_bytes()
    path.unlink()
    job = attack_sets.set_jobs("smoke")[0]
    found = attack_sets.perturbed(job.arguments, folder / "attacks" / "runs" / job.name)
    assert path.read_bytes() == before
    assert len(found) == 359

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(attack_sets, "minimal", never)
    assert list(records_of("attacks", folder)) == SETS


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_records_of_sets_with_other_options_raise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records_of("attacks", folder)
    monkeypatch.setattr(attack_sets, "ATTACK", {**attack_sets.ATTACK, "limit": 0.05})
    with pytest.raises(ValueError, match="is the record of other settings or another scale"):
        records_of("attacks", folder)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_set_of_other_options_is_not_taken_for_this_one(folder: Path) -> None:
    records_of("attacks", folder)
    run_folder = folder / "attacks" / "runs" / SETS[0]
    arguments = next(job.arguments for job in attack_sets.set_jobs("smoke") if job.name == SETS[0])
    attack_sets.perturbed(arguments, run_folder)
    other = {**arguments["attack"], "options": {**arguments["attack"]["options"], "steps": 7}}
    with pytest.raises(ValueError, match="made with other options"):
        attack_sets.perturbed({**arguments, "attack": other}, run_folder)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_killed_attack_resumes_with_the_next_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack_sets, "_CHUNK", 100)
    calls: list[str] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        if len(calls) == 2:
            calls.append("killed")
            raise KeyboardInterrupt
        calls.append("made")
        return minimal(*arguments, **options)

    monkeypatch.setattr(attack_sets, "minimal", counted)
    monkeypatch.setattr(attack_sets, "chosen_confidence", lambda *_: 0.01)
    jobs = attack_sets.set_jobs("smoke")[:1]
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(attack_sets.make_set, jobs, tmp_path, workers=1))
    list(run_jobs(attack_sets.make_set, jobs, tmp_path, workers=1))
    assert calls == ["made", "made", "killed", "made", "made"]
