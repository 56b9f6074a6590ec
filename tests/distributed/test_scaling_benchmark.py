"""The benchmark of two processes against one, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import scaling

ROOT = Path(__file__).parents[2]


@pytest.mark.grid
def test_scaling_as_a_user_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "benchmarks.scaling", "--quick", "--methods", "map,vogn", "--json", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["threads"] == 1
    assert list(record["numbers"]) == ["map", "vogn"]
    for row in record["numbers"].values():
        assert row["bytes"] == row["expected_bytes"] > 0
        assert row["reductions"] == 1
        assert all(0 < row[name]["low"] <= row[name]["median"] <= row[name]["high"] for name in ("strong", "weak"))
        assert row["exchange_share"]["median"] > 0
    rounded = record["numbers"]["vogn"]["bfloat16"]
    assert 1e-3 < rounded["gradients"] < 4e-3  # two roundings to 8 bits
    assert 1e-3 < rounded["squares"] < 4e-3
    strong = record["numbers"]["vogn"]["strong"]
    assert f"{strong['median']:.2f} ({strong['low']:.2f}–{strong['high']:.2f})" in done.stdout


def test_throughput_counts_the_examples_of_both() -> None:
    # Two processes need 3 s for what takes one 6 s, and 6 s for twice as much.
    found = scaling._numbers({"alone": [6.0, 12.0], "again": [6.0, 12.0], "strong": [3.0, 6.0], "weak": [6.0, 12.0]}, 3)
    assert found["again"]["median"] == 1
    assert found["strong"]["median"] == pytest.approx(2)
    assert found["weak"]["median"] == pytest.approx(2)
    assert found["milliseconds"] == pytest.approx(3000)
