"""The benchmarks run as a user runs them, and measure what they say: times by a clock we hold, bytes we count."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import adaptive_draws, cost_size, links, methods, step_cost
from benchmarks.memory import peak_bytes, peak_of
from benchmarks.networks import NETS
from benchmarks.peers import PEERS, Peer, replace_layers
from benchmarks.timing import interleave, ratio
from torch import nn

from credo.models import build_model

ROOT = Path(__file__).parents[2]


def run(program, path, *options):
    command = [sys.executable, "-m", f"benchmarks.{program}", "--quick", "--json", str(path), "--peers", "none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.fixture
def run_here(capsys):
    """The same without a process of its own, whose start would cost as much as the benchmark."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()

    def run(program, path, *options):
        importlib.import_module(f"benchmarks.{program}").main(["--quick", "--json", str(path), *options])
        return capsys.readouterr().out, json.loads(path.read_text())

    yield run
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_networks_of_sequences_are_the_same_every_time():
    for name in ("transformer", "lstm", "vit", "mlp1200"):
        net = NETS[name]
        first, second = net.build(), net.build()
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert first(torch.zeros(2, *net.shape)).shape == (2, 10)


def test_step_cost_as_a_user_runs_it(tmp_path):
    output, record = run("step_cost", tmp_path / "step.json", "--nets", "mlp", "--methods", "map,bbb,bbb-adversarial")
    rows = record["numbers"]["mlp"]
    assert list(rows) == ["Adam", "Adam again", "Adam, fused", "AdamW, fused", "map", "bbb", "bbb-adversarial"]
    assert rows["Adam"]["median"] == 1
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in rows.values())
    assert f"{rows['bbb']['median']:.2f} ({rows['bbb']['low']:.2f}–{rows['bbb']['high']:.2f})" in output
    assert {"config", "versions", "threads", "cpu_count", "seconds"} <= set(record)
    assert record["threads"] == 1
    assert record["kernels"] is (os.environ.get("CREDO_KERNELS", "1") == "1")
    beside = rows["bbb-adversarial"]["beside_bbb"]
    assert 0 < beside["low"] <= beside["median"]  # how it compares with Adam's is not tested: other jobs may run
    assert "the aim is 5 + 2.3 at most" in output
    assert ("missed" in output) == (beside["median"] > 7.3)
    # Weights, gradients, two moments: Adam cannot do with less; BBB has each of them twice.
    weights = 4 * sum(p.numel() for p in NETS["mlp"].build().parameters())
    assert 4 * weights < rows["Adam"]["memory_bytes"] < 8 * weights
    assert rows["Adam again"]["memory"] == 1
    assert rows["bbb"]["memory_bytes"] > 8 * weights


def assert_ratio_of_two_rounds(found, own, reference):
    """The ratio of the mean times lies between those of the two rounds, known from both quantiles."""
    margin = (found["high"] - found["low"]) / 8
    ratio = own["milliseconds"] / reference["milliseconds"]
    assert 0 < found["low"] <= found["median"] <= found["high"]
    assert found["low"] - margin <= ratio * (1 + 1e-9)
    assert found["high"] + margin >= ratio * (1 - 1e-9)


@pytest.mark.grid
def test_predict_cost_as_a_user_runs_it(tmp_path, run_here):
    output, record = run_here("predict_cost", tmp_path / "predict.json", "--peers", "none", "--threads", "1")
    plain, trained = record["numbers"]["mlp-200"], record["numbers"]["digits"]
    assert list(plain["time"]) == [
        "S forward passes",
        "bbb auto",
        "bbb loop",
        "bbb activation",
    ]
    assert list(trained["time"]) == [*plain["time"], "bbb adaptive"]
    for case in (plain, trained):
        for row in case["time"].values():
            assert_ratio_of_two_rounds(row, row, case["time"]["S forward passes"])
    full, adaptive = trained["quality"]["bbb auto"], trained["quality"]["bbb adaptive"]
    assert full["draws"] == 30
    assert 10 <= adaptive["draws"] <= 30
    assert full["accuracy"] > 0.5
    assert trained["quality"]["difference"]["nll"] == pytest.approx(adaptive["nll"] - full["nll"])
    assert f"{adaptive['nll']:.4f} ± {adaptive['nll_error']:.4f}" in output
    latency = record["numbers"]["latency"]
    assert latency["one forward pass"]["median"] == 1
    for draws in (1, 8, 32):
        assert {f"{row}, {draws}" for row in ("bbb, predict", "bbb, predictor")} < latency.keys()
        own, stored = latency[f"bbb, predictor, {draws}"], latency[f"vmap over stored draws, {draws}"]
        assert_ratio_of_two_rounds(own["by_stored"], own, stored)
    for row in latency.values():
        assert_ratio_of_two_rounds(row, row, latency["one forward pass"])
    assert f"{latency['bbb, predictor, 32']['by_stored']['median']:.2f}" in output
    made = record["tables"]["latency"]
    assert [row[0] for row in made["rows"]] == list(latency)
    assert made["rows"][1][2].startswith(f"{latency['map, predict']['median']:.2f} (")


def test_a_wrong_name_says_which_one_was_meant(capsys):
    with pytest.raises(SystemExit, match="2"):
        step_cost.arguments(["--methods", "map,bbb-ltr"])
    assert "Did you mean 'bbb-lrt'?" in capsys.readouterr().err


def test_ratios_are_taken_within_rounds():
    now = 0.0
    speed = iter([1.0, 1.0, 5.0, 5.0, 0.2, 0.2])  # the machine slows down and speeds up, the same for both in a round

    def work(duration):
        def block():
            nonlocal now
            now += duration * next(speed)

        return block

    seconds = interleave({"one": work(3.0), "two": work(6.0)}, rounds=3, clock=lambda: now)
    found = ratio(seconds["two"], seconds["one"])
    assert [found.low, found.median, found.high] == pytest.approx([2, 2, 2])
    assert sorted(seconds["one"]) == pytest.approx([0.6, 3, 15])


def test_the_spread_is_the_middle_80_percent():
    found = ratio([float(i) for i in range(101)], [1.0] * 101)
    assert (found.low, found.median, found.high) == pytest.approx((10, 50, 90))


def test_peak_counts_temporaries_and_what_was_there_before():
    def make():
        kept = torch.empty(250_000)

        def work():
            for _ in range(2):
                temporary = torch.empty(100_000)
                del temporary
            return kept

        return work

    assert peak_bytes(make) == 1_400_000


def test_step_cost_goes_on_from_its_record_and_keeps_tables_for_pages(tmp_path, run_here, monkeypatch):
    measured = []

    def measure(name, net, builders, peers, effort):
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {
            "Adam": {"median": 1.0, "low": 1.0, "high": 1.0, "milliseconds": 2.0},
            "gone": {"missing": "refused: x"},
        }

    path = tmp_path / "step.json"
    monkeypatch.setattr(step_cost, "measure", measure)
    options = "--nets", "mlp,lstm", "--methods", "map", "--peers", "none"
    with pytest.raises(KeyboardInterrupt):
        run_here("step_cost", path, *options)
    kept = json.loads(path.read_text())["tables"]
    assert kept == {
        "time": {"columns": ["", "mlp"], "rows": [["Adam", "1 = 2 ms"], ["gone", "–"]], "notes": ["gone: refused: x"]}
    }
    _, record = run_here("step_cost", path, *options)
    assert measured == ["mlp", "lstm", "lstm"]
    assert record["tables"]["time"]["columns"] == ["", "mlp", "lstm"]
    run_here("step_cost", path, *options[:-1], "ivon-opt")  # other settings: anew
    assert measured[3:] == ["mlp", "lstm"]


def test_kfac_is_timed_over_whole_periods_after_its_first_steps():
    seen = []
    for name, period in methods.PERIODS.items():
        posterior = methods.posterior_of(name, nn.Linear(3, 10))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(methods, "posterior_of", lambda *_, made=posterior: made)
            step = methods.method_step(name)(nn.Linear(3, 10))
        before = inverse_of(posterior)
        new = []
        for index in range(3 + 2 * period):  # three to warm up
            step(torch.randn(4, 3), torch.arange(4))
            if not torch.equal(inverse_of(posterior), before) and index >= 3:
                new.append(index)
            before = inverse_of(posterior)
        seen.append(len(new))
        assert new[1] - new[0] == period == posterior.inverse_every
    assert seen == [2, 2, 2, 2]


def inverse_of(posterior):
    block = posterior.blocks[0]
    return getattr(block, block.inverses[1]).clone()


def test_memory_of_kfac_is_that_of_a_step_with_new_inverses():
    effort = step_cost.Effort(rounds=1, most_steps=1, memory=True, time=False)
    builders = {"Adam": step_cost.reference_step("Adam")}
    builders |= {name: step_cost.method_step(name) for name in ("noisy-kfac", "noisy-kfac-dense")}
    rows = step_cost.measure("mlp", NETS["mlp"], builders, [], effort)
    assert rows["noisy-kfac"]["memory_bytes"] == rows["noisy-kfac-dense"]["memory_bytes"]
    assert "median" not in rows["Adam"]
    assert list(step_cost.result_tables({"mlp": rows})) == ["memory"]


def test_passes_of_adaptive_predictions_are_counted(tmp_path, run_here):
    output, record = run_here("adaptive_draws", tmp_path / "adaptive.json")
    assert list(record["numbers"]) == ["convnet, bbb", "convnet, vogn"]
    for found in record["numbers"].values():
        assert found["all"]["passes"] == 1
        passes = [found[f"{tolerance}"]["passes"] for tolerance in adaptive_draws.TOLERANCES]
        assert passes == sorted(passes, reverse=True)
        assert 0.1 <= passes[-1] <= passes[0] <= 1
    assert record["tables"]["passes"]["rows"][1][1:3] == [
        "0.005",
        f"{record['numbers']['convnet, bbb']['0.005']['passes']:.2f}",
    ]
    assert "convnet, vogn" in output


def test_peak_ignores_releases_of_older_memory():
    def memory(ts, address, size):
        return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": size, "Device Type": 0}}

    events = [memory(1, 7, 100), memory(2, 9, -1000), memory(3, 8, 50), memory(4, 7, -100), memory(6, 7, 500)]
    assert peak_of(events, start=0, end=5) == 150
    # 100 and 50 are alive when the step begins with releasing the 100.
    assert peak_of(events, start=3.5, end=5) == 150
    assert peak_of([*events, {"name": "other"}], start=0, end=7) == 550


def test_peers_that_are_missing_or_break_get_a_row(monkeypatch):
    def broken(net):
        raise ImportError("built for another torch")

    monkeypatch.setitem(PEERS, "ghost", Peer("no-such-library", nn.Module.train, lambda *batch: torch.zeros(())))
    monkeypatch.setitem(PEERS, "broken", Peer("torch", broken, lambda *batch: torch.zeros(())))
    adam = {"Adam": step_cost.reference_step("Adam")}
    effort = step_cost.Effort(rounds=1, most_steps=1, memory=False)
    rows = step_cost.measure("mlp", NETS["mlp"], adam, ["ghost", "broken"], effort)
    assert rows["ghost"] == {"missing": "not installed"}
    assert rows["broken"] == {"missing": "fails: built for another torch"}
    assert "not installed" in step_cost.tables({"mlp": rows})


def test_a_twin_has_every_layer_replaced_and_nothing_else():
    class Other(nn.Module):
        pass

    net = build_model("resnet20", seed=0)
    before = {name: type(module) for name, module in net.named_modules()}
    replace_layers(net, lambda layer: Other() if type(layer) in (nn.Linear, nn.Conv2d) else None)
    after = {name: type(module) for name, module in net.named_modules()}
    assert after == {name: Other if kind in (nn.Linear, nn.Conv2d) else kind for name, kind in before.items()}
    assert list(after.values()).count(Other) == 20


@pytest.mark.grid
def test_compaction_as_a_user_runs_it(tmp_path, run_here):
    output, record = run_here("compaction", tmp_path / "compaction.json")
    assert list(record["numbers"]) == ["lenet5", "resnet20"]
    for kinds in record["numbers"].values():
        whole, pruned, small = (kinds[kind] for kind in ("whole", "pruned", "compact"))
        assert whole["parameters"] == pruned["parameters"] > small["parameters"]
        assert whole["file_bytes"] > pruned["file_bytes"] >= small["file_bytes"] > 0
        assert small["memory_bytes"] == 4 * small["parameters"]
        assert whole["ratio"]["median"] == 1
        assert all(kind["milliseconds"] > 0 for kind in kinds.values())
    assert "lenet5 compact" in output
    # Inner units by halves: conv1 3→3 channels, conv2 3→8, then 8·25→60→42→10, with biases.
    assert record["numbers"]["lenet5"]["compact"]["parameters"] == 15_888


def test_links_are_compared_with_many_draws(capsys):
    links.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    rows = {
        cells[1].strip(): [float(cell) for cell in cells[2:-1]] for cells in (line.split("|") for line in lines[4:-1])
    }
    assert list(rows) == ["extended-probit", "probit", "bridge", "draws, 32", "mean"]
    assert all(0 <= value < 1 for row in rows.values() for value in row)
    assert rows["extended-probit"][-1] < rows["mean"][-1]  # the widest posterior, under noise


@pytest.mark.slow
def test_laplace_is_measured_around_a_mode(tmp_path, run_here):
    output, record = run_here("gap_modes", tmp_path / "modes.json")
    kinds = ("full", "last", "evidence", "narrow", "wide")
    assert list(record["numbers"]) == ["HMC", *(f"{kind}, start 0" for kind in kinds)]
    full, last = record["numbers"]["full, start 0"], record["numbers"]["last, start 0"]
    assert full["gradient"] < 1e-3  # a mode, of a density whose gradient elsewhere is in the hundreds
    assert full["ratio"] > 5 > last["ratio"] > 1
    assert "last, start 0" in output


def test_intervals_of_an_overfitted_regression(tmp_path, run_here):
    _, record = run_here("overfitted", tmp_path / "overfitted.json")
    (row,) = record["tables"]["coverage"]["rows"]
    assert row[0] == "diabetes 300, 300 steps"
    (one,) = record["numbers"][row[0]]
    assert all(0 < one[kind]["coverage"] <= 1 for kind in ("alone", "all", "calibrated"))


@pytest.mark.slow
def test_costs_of_laplace_are_multiples_of_plain_passes(tmp_path, run_here):
    output, record = run_here("laplace_cost", tmp_path / "cost.json")
    table = record["tables"]["cost"]
    assert table["columns"][2:] == ["MLP 784-400-400-10", "ResNet-20"]
    assert [row[1] for row in table["rows"]][:2] == ["forward epoch", "training epoch"]
    assert all(float(cell) > 0 for row in table["rows"] if "predict" in row[0] for cell in row[2:])
    assert "`predict`, last layer" in output


def test_cost_against_size_goes_on_from_its_record(tmp_path, run_here, monkeypatch):
    def measured(net, width, batch, rounds, *, period):
        times = dict.fromkeys((cost_size.ADAM, *cost_size.METHODS), width**1.5 * batch)
        return {"parameters": width, "milliseconds": {**times, "vogn": width**2.25 * batch}}

    path = tmp_path / "size.json"
    monkeypatch.setattr(cost_size, "measure", measured)
    output, record = run_here("cost_size", path, "--picture", str(tmp_path / "size.png"))
    assert len(record["numbers"]) == 4
    slopes = {
        row.split("|")[1].strip(): row.split("|")[-2].strip() for row in reversed(output.splitlines()) if "|" in row
    }
    assert (slopes["Adam"], slopes["vogn"]) == ("1.50", "2.25")  # of the first table: widths
    assert (tmp_path / "size.png").stat().st_size > 10_000
    monkeypatch.delattr(cost_size, "measure")
    again, later = run_here("cost_size", path)
    assert later["numbers"] == record["numbers"]
    assert again == output


@pytest.mark.grid
def test_cost_against_size_measures(run_here, tmp_path):
    _, record = run_here("cost_size", tmp_path / "size.json")
    times = [point["milliseconds"] for point in record["numbers"].values()]
    assert all(set(found) == {cost_size.ADAM, *cost_size.METHODS} and min(found.values()) > 0 for found in times)
