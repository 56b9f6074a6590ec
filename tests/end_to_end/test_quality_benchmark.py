"""The quality benchmark as a user runs it; its scores, intervals and comparisons against slow obvious ways."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import quality
from benchmarks.quality_methods import OURS
from benchmarks.quality_peers import PEERS, descend, missing
from benchmarks.quality_tables import best_of, image_losses, packed, quality_table, scores, unpacked
from benchmarks.quality_tasks import TASKS, Contender, Trained
from benchmarks.report import Run
from sklearn.metrics import log_loss, roc_auc_score
from torch.nn import functional as F

from credo import MAP, fit
from credo.data import Batches

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    threads, state = torch.get_num_threads(), torch.get_rng_state()

    def here(*options):
        quality.main(["--quick", "--methods", "ensemble,ivon,ogn", "--threads", "1", *options])
        return capsys.readouterr()

    yield here
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_as_a_user_runs_it_and_runs_it_again(tmp_path, run):
    done = run("--peers", "none", "--folder", str(tmp_path))
    record = json.loads((tmp_path / "digits.json").read_text())
    rows = record["numbers"]
    assert list(rows) == ["map", "ogn", "ivon", "ensemble"]
    assert rows["ensemble"]["options"] == rows["map"]["options"] == rows["map"]["tried"][0]["options"]
    stored = {name: row["runs"][0]["numbers"] / rows["map"]["runs"][0]["numbers"] for name, row in rows.items()}
    assert stored == {"map": 1, "ensemble": 5, "ivon": 2, "ogn": 1}
    value, low, high = rows["ogn"]["scores"]["nll"]
    assert low < value < high
    assert value == pytest.approx(rows["ogn"]["runs"][0]["nll"])
    assert f"{value:.3f} ({low:.3f}–{high:.3f})" in done.out
    assert record["config"]["sizes"]["train"] + record["config"]["sizes"]["validation"] == 1438

    before = rows.pop("ogn")
    (tmp_path / "digits.json").write_text(json.dumps({**record, "numbers": rows}))
    again = run("--peers", "none", "--folder", str(tmp_path))
    said = again.err.splitlines()
    assert [line.endswith("digits.json") for line in said] == [True, False, True, True]
    after = json.loads((tmp_path / "digits.json").read_text())["numbers"]
    assert (after["ogn"]["scores"], after["ivon"]) == (before["scores"], rows["ivon"])


@pytest.mark.skipif(not missing(PEERS), reason="all peers are installed")
def test_a_peer_that_is_not_installed_is_named_before_anything_runs(capsys):
    absent = missing(PEERS)[0]
    with pytest.raises(SystemExit, match="2"):
        quality.arguments(["--peers", absent])
    message = capsys.readouterr().err
    assert f"not installed: {absent}" in message
    assert "pip install --no-deps -r benchmarks/peers.txt" in message
    assert absent not in quality.arguments([]).peers
    assert f"left out, since not installed: {absent}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # theirs, not ours
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_learns_what_ours_learn(name):
    if missing([name]):
        pytest.skip(f"{name} is not installed")
    task = replace(TASKS["digits"](), epochs=10)
    trained = PEERS[name].train(task, PEERS[name].settings[1], seed=0)
    probs = trained.predict(task.validation.x)
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(task.validation)))
    assert (probs.argmax(-1) == task.validation.y).double().mean() > 0.9


def test_peers_see_the_batches_and_rates_of_fit():
    task = replace(TASKS["digits"](), epochs=2)
    ours = MAP(task.network(3), data_size=len(task.train), optimizer="sgd", lr=0.1)
    fit(ours, Batches(task.train, batch_size=64, seed=3), epochs=2, schedule=task.schedule, progress=False)
    theirs = task.network(3)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()

    descend(task, 3, optimizer, step)
    for mine, other in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_scores_are_means_over_seeds_of_the_usual_ones():
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(3, 400, 4, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    outside = torch.randn(3, 100, 4, generator=generator, dtype=torch.float64).softmax(-1)
    labels = torch.multinomial(inside[0], 1, generator=generator).squeeze(-1)
    found = scores(inside, labels, outside)
    expected = [log_loss(labels, probs, labels=range(4)) for probs in inside]
    assert found["nll"][0] == pytest.approx(sum(expected) / 3)
    doubts = [torch.special.entr(torch.cat([a, b])).sum(-1) for a, b in zip(inside, outside, strict=True)]
    aurocs = [roc_auc_score([0] * 400 + [1] * 100, doubt) for doubt in doubts]
    assert found["ood_auroc"][0] == pytest.approx(sum(aurocs) / 3)
    assert all(low <= value <= high for value, low, high in found.values())
    # A mean of 400 independent losses: the interval is about four standard errors wide.
    losses = image_losses(inside, labels)
    width = 2 * 1.96 * losses.std().item() / 400**0.5
    assert found["nll"][2] - found["nll"][1] == pytest.approx(width, rel=0.15)
    torch.testing.assert_close(unpacked(packed(losses)), losses, rtol=1e-3, atol=0)


def made_row(losses, validation, peer=False):
    tried = [{"options": {"lr": i + 1, "prior": 1}, "validation_nll": v} for i, v in enumerate(validation)]
    row = {"peer": peer, "tried": tried, "options": {"lr": 1, "prior": 1}}
    cells = {name: [0.5, 0.4, 0.6] for name in ("accuracy", "nll", "ece", "ood_auroc")}
    return row | {"scores": cells, "image_nll": packed(losses)}


def test_the_best_is_chosen_on_validation_and_compared_image_by_image():
    losses = torch.rand(500, generator=torch.Generator().manual_seed(0)).double()
    noise = torch.randn(500, generator=torch.Generator().manual_seed(1)).double() * 0.02
    rows = {
        "map": made_row(losses - 0.1, [0.4, 0.35]),
        "bbb": made_row(losses, [0.3, None]),  # a setting that diverged
        "ensemble": made_row(losses, []),  # five networks: no rival for the best of those that train one
        "equal": made_row(losses + noise - noise.mean(), [0.2], peer=True),
        "worse": made_row(losses + noise + 0.01, [0.2], peer=True),
        "failed": made_row(losses + 1, [None], peer=True),
    }
    assert best_of(rows) == "bbb"
    table = quality_table(rows)
    # Separate intervals of these losses are 0.05 wide; differences of 0.01 show since they are taken image by image.
    assert [line[-1] for line in table["rows"]] == ["worse", "", "equal", "equal", "better", "better"]
    assert table["columns"][-2:] == ["NLL − bbb's", "bbb is"]
    assert table["rows"][0][-2].startswith("-0.100 (-0.100 to")
    assert table["notes"] == ["Chosen settings: map lr 1; bbb lr 1."]


def test_a_setting_that_fails_is_not_chosen(monkeypatch):
    def train(task, options, seed):
        value = torch.nan if options["lr"] == 1 else 2.0
        return Trained(lambda x: torch.softmax(torch.full((len(x), 10), value), -1))

    task = replace(TASKS["digits"](), seeds=1)
    monkeypatch.setitem(quality.CONTENDERS, "odd", Contender(train, [{"lr": 1}, {"lr": 2}]))
    row = quality.contend(task, "odd", {}, quality.CONTENDERS["odd"].settings)
    assert row["options"] == {"lr": 2}
    assert row["scores"]["nll"][0] == pytest.approx(torch.tensor(10.0).log())


def test_only_rows_of_the_same_task_and_settings_are_taken_from_a_record(tmp_path):
    run = Run("quality", {"task": "digits", "sizes": {"train": 5}}, None)
    path = tmp_path / "digits.json"
    assert quality.stored(path, run.config) == {}
    path.write_text(json.dumps({"config": run.config, "numbers": {"map": 1}}))
    assert quality.stored(path, run.config) == {"map": 1}
    assert quality.stored(path, {**run.config, "sizes": {"train": 6}}) == {}
    settings = OURS["ivon"].settings
    row = made_row(torch.zeros(3), [0.1] * 4) | {"tried": [{"options": one} for one in settings]}
    assert quality.is_done(row, settings, None)
    assert not quality.is_done(row, [*settings[:3], {**settings[3], "lr": 7.0}], None)
    assert not quality.is_done(None, settings, None)
    assert quality.is_done({"options": {"lr": 1}}, [], {"options": {"lr": 1}})
    assert not quality.is_done({"options": {"lr": 1}}, [], {"options": {"lr": 2}})
