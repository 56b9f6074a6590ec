"""The benchmark of fidelity: measures of two contenders, its table, and that a stopped run goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fidelity import __main__ as benchmark
from benchmarks.fidelity import tasks
from benchmarks.fidelity.table import make_tables, write_tables

SHORT = {"chains": 2, "warmup": 30, "samples": 16, "settings": {"thin": 1, "max_steps": 8, "start_steps": 20}}


@pytest.mark.filterwarnings("ignore:HMC", "ignore::credo.CredoWarning")
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: replace(tasks.TASKS[name](0), chains=SHORT, steps=4) for name in ("gap", "moons")}
    monkeypatch.setattr(benchmark, "TASKS", {name: lambda seed, name=name: made[name] for name in made})
    monkeypatch.setattr(benchmark, "DRAWS", 16)
    for name in made:
        benchmark.run_task(name, ["MAP"], 1, tmp_path)
    first = json.loads((tmp_path / "gap.json").read_text())["numbers"]
    assert set(first) == {"HMC, seed 0", "MAP, seed 0"}
    assert first["MAP, seed 0"]["gap_ratio"] is None  # a point has no spread
    assert first["HMC, seed 0"]["gap_ratio"] > 0
    assert first["HMC, seed 0"]["chains"]["chains"] == 2
    benchmark.run_task("gap", ["MAP", "BBB"], 1, tmp_path)
    again = json.loads((tmp_path / "gap.json").read_text())["numbers"]
    assert {key: again[key] for key in first} == first
    assert {"tv", "top1"} <= set(json.loads((tmp_path / "moons.json").read_text())["numbers"]["MAP, seed 0"])
    write_tables(tmp_path)
    found = make_tables(tmp_path)["tables"]  # the file of tables is no record
    assert [row[:2] for row in found["gap"]["rows"]] == [["HMC", 1], ["MAP", 1], ["BBB", 1]]
    assert [row[0] for row in found["moons"]["rows"]] == ["HMC", "MAP"]
    assert found["gap"]["rows"][1][-1] == "1.0"  # costs are relative to MAP's
    assert [row[:3] for row in found["chains"]["rows"]] == [["gap", 1, 2], ["moons", 1, 2]]
    assert f"{again['BBB, seed 0']['w1']['value']:.3f}" in found["gap"]["rows"][2][2]
    curve = again["BBB, seed 0"]["curve"]
    assert len(curve["mean"]) == len(curve["std"]) == len(benchmark.CURVE)
    drawn = json.loads((tmp_path / "moons.json").read_text())["numbers"]["HMC, seed 0"]["map"]
    for rows in drawn.values():  # two digits for each point of the grid
        assert [len(row) for row in rows] == [2 * len(benchmark.ACROSS)] * len(benchmark.UP)
