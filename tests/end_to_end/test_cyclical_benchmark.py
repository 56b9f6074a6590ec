"""The benchmark of cyclical samplers: its table is that of the reported seeds alone."""

import json
from pathlib import Path

import pytest
from benchmarks import cyclical


def entry(row: str, seed: int, error: float) -> dict[str, object]:
    scores = {"error": error, "nll": 2 * error, "ece": 0.1, "ood_auroc": 0.7, "networks": 12}
    later = {} if seed == cyclical.TUNING_SEED else {"calibrated": {"nll": error}}
    return {"row": row, "seed": seed, "lr": 1e-3, "epochs": 20, "process_seconds": 30.0, **scores, **later}


def test_the_table_has_means_of_reported_seeds(tmp_path: Path) -> None:
    tuned = entry("cSGHMC", cyclical.TUNING_SEED, 0.1)
    numbers = {"a": tuned, "b": entry("cSGHMC", 0, 0.4), "c": entry("cSGHMC", 1, 0.5), "d": entry("SGD", 0, 0.6)}
    config = {"net": "lenet5", "images": 5000, "epochs": 20}
    (tmp_path / "lenet5-5000-20.json").write_text(json.dumps({"config": config, "numbers": numbers}))
    cyclical.write_table(tmp_path)
    table = json.loads((tmp_path / cyclical.TABLE).read_text())
    assert table == cyclical.make_table(tmp_path)  # the file of the table is no record
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert table["rows"][1:] == [
        ["SGD", 1, "0.001", "12", "60.00", "1.200", "0.600", "0.100", "0.700", "30"],
        ["cSGHMC", 2, "0.001", "12", "45.00", "0.900", "0.450", "0.100", "0.700", "30"],
    ]


@pytest.mark.parametrize("row", list(cyclical.ROWS))
def test_every_row_can_be_built(row: str) -> None:
    from credo.models import build_model

    build, rates = cyclical.ROWS[row]
    assert len(rates) == 3  # equal tuning
    posterior = build(lambda seed: build_model("lenet5", inputs=[3, 32, 32], classes=10, seed=seed), 100, 0, rates[0])
    assert len(posterior.parts) == (cyclical.MEMBERS if row.startswith("ensemble") else 1)
