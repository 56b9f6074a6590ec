"""The bytes that shapes say are those that were sent; the cost model adds up."""

import json
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from benchmarks import cost_model
from benchmarks.exchange import METHODS, Exchange, exchange_of

from credo.models import build_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from exchange_worker import network  # noqa: E402
from forks import load  # noqa: E402

sys.path.pop(0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("exchange")
    done = forked.run(HERE / "exchange_worker.py", str(folder), folder=folder)
    assert done.returncode == 0, done.stdout
    return load(folder, "exchanged", 2)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_that_were_sent(measured: list[dict[Any, Any]], method: str) -> None:
    expected = exchange_of(method, network())
    for found in measured:
        assert found[method, None] == (1, expected.size())
        assert found[method, "bfloat16"] == (1, expected.size(compress=True))


def test_bytes_of_a_network_that_one_can_count() -> None:
    weights, factors = 72 + 8 + 185 + 63, (18**2 + 4**2) + (37**2 + 5**2) + (21**2 + 3**2)
    assert exchange_of("map", network()) == Exchange(weights, 0, 2 + 7)
    assert exchange_of("bbb", network()).gradients == 2 * weights - 8
    assert exchange_of("vogn", network()) == Exchange(weights, weights, 1)
    assert exchange_of("kfac", network()) == Exchange(weights, factors + 8, 1)
    assert Exchange(10, 5, 3).size() == 4 * 18
    assert Exchange(10, 5, 3).size(compress=True) == 2 * 15 + 8 * 3
    with pytest.raises(ValueError, match="No exchange is known for 'laplace'"):
        exchange_of("laplace", network())


def test_the_page_has_these_sizes() -> None:
    networks = [
        build_model("resnet20", inputs=(3, 32, 32), classes=10),
        build_model("resnet18", inputs=(3, 224, 224), classes=1000, stem="imagenet"),
    ]
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line.split("|")[3:5] for line in page.splitlines() if line.startswith("| `")}
    for method in METHODS:
        sizes = [f" {exchange_of(method, network).size() / 1e6:.2f} MB " for network in networks]
        assert rows[method] == sizes


def test_a_ring_sends_nearly_everything_twice() -> None:
    ring = cost_model.Cluster(processes=4, bandwidth=100.0, latency=0.5)
    assert ring.exchange_seconds(200) == pytest.approx(2 * 3 / 4 * 200 / 100 + 2 * 3 * 0.5)
    assert cost_model.Cluster(processes=1, bandwidth=100.0, latency=0.5).exchange_seconds(200) == 0


def test_projection_adds_compute_and_exchange() -> None:
    ring = cost_model.Cluster(processes=2, bandwidth=100.0, latency=0.0)
    compute = cost_model.fitted_compute(30.0, 200, ring, 10)
    assert compute == pytest.approx(30 / 10 - 2)
    rows = cost_model.project(
        {"map": 200, "vogn": 400, "node-bnn": 200},
        {"map": 1.0, "vogn": 1.5},
        ring,
        steps=10,
        compute=compute,
        published={"map": 30.0, "vogn": 70.0},
    )
    assert rows["map"].epoch_seconds == pytest.approx(30.0)
    assert rows["vogn"].epoch_seconds == pytest.approx(10 * (1.5 * compute + 4))
    assert rows["vogn"].published_ratio == pytest.approx((70 / 10 - 4) / compute)
    assert (rows["node-bnn"].ratio, rows["node-bnn"].epoch_seconds) == (None, None)
    with pytest.raises(SystemExit, match="--bandwidth is too small"):
        cost_model.fitted_compute(15.0, 200, ring, 10)


def test_an_exchange_longer_than_the_published_step_leaves_no_compute_to_show() -> None:
    ring = cost_model.Cluster(processes=2, bandwidth=100.0, latency=0.0)
    published = {"map": 30.0, "kfac": 70.0}
    rows = cost_model.project({"map": 200, "kfac": 900}, {}, ring, steps=10, compute=1.0, published=published)
    assert rows["kfac"].published_ratio == pytest.approx(7 - 9)
    line = next(line for line in cost_model.shown(rows, "").splitlines() if line.startswith("| kfac"))
    assert line.split("|")[-2].strip() == "–"


def test_cost_model_as_a_user_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    cost_model.main(["--json", str(path)])
    printed = capsys.readouterr().out
    numbers = json.loads(path.read_text())["numbers"]
    assert numbers["steps"] == 313
    assert numbers["rows"]["map"]["epoch_seconds"] == pytest.approx(44.13)
    assert numbers["rows"]["map"]["bytes"] == pytest.approx(4 * 11_689_512, rel=1e-4)
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    missing = [line for line in printed.splitlines() if line.startswith("|") and line not in page]
    assert missing == [], "step_cost was measured anew? Then docs/distributed.md needs the new table, and its text"
