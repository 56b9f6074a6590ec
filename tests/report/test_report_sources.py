"""Where a report takes its contents from: logs, studies of draws, the doctor; and which runs it rejects."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.core.support.files import finite
from credo.data import Split, load_dataset
from credo.experiments.config import make_experiment
from credo.experiments.diagnosis import asked, diagnose_run
from credo.experiments.runs import Run
from credo.report import gather, render

OOD = "photo-patches"
FINDINGS = {
    "verdict": "One alarm <i>here</i>.",
    "findings": [
        {
            "name": "collapse",
            "severity": "alarm",
            "text": "fc1 holds nothing.",
            "advice": "Cool it.",
            "arguments": {"t": 0.1},
            "target": "method",
        },
        {"name": "other", "severity": "unheard-of", "text": "Text.", "advice": "", "argument": None},
    ],
    "measurements": {
        "kl": {"total": 1234.5, "none": None, "ratio": {"value": 2.5, "low": 2.0, "high": 3.0}},
        "steps": 7,
    },
    "layers": [{"name": "fc1", "snr": 0.02, "std_ratio": 1.0, "collapsed": True}],
}
SAMPLES = {"draws": 20, "lowest": 0.5, "highest": 0.9, "mean": 0.7, "ensembled": 0.85}


def copied(run: Path, place: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(run, place / name))


def test_a_run_without_a_log(digits_runs: list[Path], tmp_path: Path, parsed: Callable) -> None:
    copy = copied(digits_runs[0], tmp_path)
    (copy / "log.jsonl").unlink()
    assert not parsed(render(gather([copy], draws=2, doctor=False))).all("section", id="training")
    both = parsed(render(gather([copy, digits_runs[1]], draws=2, doctor=False)))
    assert both.all("section", id="training")[0].all("span", class_="run")[0].text == "bbb"


@pytest.mark.parametrize("with_list", [False, True])
def test_single_draws(digits_runs: list[Path], tmp_path: Path, parsed: Callable, with_list: bool) -> None:
    copy = copied(digits_runs[1], tmp_path)
    accuracies = [0.5 + 0.4 * i / 19 for i in range(20)]
    samples = {**SAMPLES, "accuracies": accuracies} if with_list else SAMPLES
    (copy / "evaluation.json").write_text(json.dumps({"samples": samples}))
    tree = parsed(render(gather([digits_runs[0], copy], draws=2, doctor=False)))
    section = tree.all("section", id="draws")[0]
    rows = [[cell.text for cell in row.all("td")] for row in section.all("tr")[1:]]
    assert rows == [["copy", "20", "50.0 %", "70.0 %", "90.0 %", "85.0 %"]]
    assert len(section.all("figure")) == 1 + with_list
    if with_list:
        bars = section.all("figure")[1].all("rect", class_="bar")
        counts = [int(box.text.split()[0]) for box in bars]
        assert sum(counts) == 20
        assert counts == [1] * 20  # evenly spaced over the axis from 50 % to 90 %


def test_what_is_older_than_the_model_is_not_shown(digits_runs: list[Path], tmp_path: Path, parsed: Callable) -> None:
    copy = copied(digits_runs[1], tmp_path)
    (copy / "evaluation.json").write_text(json.dumps({"samples": SAMPLES}))
    before = (copy / "model.safetensors").stat().st_mtime - 10
    os.utime(copy / "evaluation.json", (before, before))
    assert not parsed(render(gather([copy], draws=2, doctor=False))).all("section", id="draws")


def test_findings_of_the_doctor(digits_runs: list[Path], tmp_path: Path, parsed: Callable) -> None:
    copy = copied(digits_runs[1], tmp_path)
    (copy / "diagnosis.json").write_text(json.dumps({**FINDINGS, "asked": asked(Run(copy))}))
    tree = parsed(render(gather([copy], draws=2)))
    article = tree.all("section", id="doctor")[0].all("article")[0]
    assert "One alarm <i>here</i>." in article.text
    first, second = article.all("ul", class_="findings")[0].all("li")
    assert first.attributes["class"] == "alarm"
    assert first.text == "alarm collapse fc1 holds nothing. → Cool it. method.t=0.1"
    assert second.attributes["class"] == "note"
    assert "→" not in second.text
    (link,) = tree.all("tbody")[0].all("a")
    assert (link.text, link.attributes["href"]) == ("Doctor: 1 alarm", "#doctor")
    layers, measurements = (table.all("td") for table in article.all("table"))
    assert [cell.text for cell in layers] == ["fc1", "0.020", "1.000", "yes"]
    assert [cell.text for cell in measurements] == ["1,234", "2.500 (2.000 to 3.000)", "7"]
    assert [cell.text for cell in article.all("table")[1].all("th")] == ["kl total", "kl ratio", "steps"]


def test_the_doctor_is_asked_where_nothing_is_known(digits_runs: list[Path], tmp_path: Path, parsed: Callable) -> None:
    copies = [copied(run, tmp_path, run.name) for run in digits_runs]
    heard: list[str] = []
    content = gather(copies, draws=2, on_progress=lambda what, *_: heard.append(what))
    assert heard[-2:] == ["examining map", "examining bbb"]
    for run in content.runs:
        assert finite(run.diagnosis) == json.loads((run.folder / "diagnosis.json").read_text())
    assert content.runs[0].diagnosis["measurements"]["scores"]["baseline"] is None
    assert content.runs[1].diagnosis["measurements"]["scores"]["baseline"]["accuracy"] > 0.1  # beside the plain network
    tree = parsed(render(content))
    verdicts = [article.all("p")[0].text for article in tree.all("section", id="doctor")[0].all("article")]
    assert verdicts == [run.diagnosis["verdict"] for run in content.runs]
    heard.clear()
    gather(copies, draws=2, on_progress=lambda what, *_: heard.append(what))
    assert not any("examining" in what for what in heard)


def examined(runs: list[Path]) -> list[str]:
    """Which runs the doctor looked at anew."""
    heard: list[str] = []
    gather(runs, draws=2, on_progress=lambda what, *_: heard.append(what))
    return [what.removeprefix("examining ") for what in heard if what.startswith("examining ")]


def test_an_earlier_diagnosis_counts_if_it_was_asked_the_same(digits_runs: list[Path], tmp_path: Path) -> None:
    plain, random = (copied(run, tmp_path, run.name) for run in digits_runs)
    diagnose_run(Run(plain))
    diagnose_run(Run(random))
    assert examined([random]) == []
    assert examined([plain, random]) == ["bbb"]  # it was asked without a baseline
    assert examined([plain, random]) == []
    assert examined([random]) == ["bbb"]  # it was asked with one
    for options in ({"draws": 2}, {"examples": 50}):
        diagnose_run(Run(random), **options)
        assert examined([random]) == ["bbb"]
    found = json.loads((random / "diagnosis.json").read_text())
    found["asked"]["version"] = "0.0.0"
    (random / "diagnosis.json").write_text(json.dumps(found))
    assert examined([random]) == ["bbb"]


def test_a_baseline_that_was_trained_again(digits_runs: list[Path], tmp_path: Path) -> None:
    plain, random = (copied(run, tmp_path, run.name) for run in digits_runs)
    gather([plain, random], draws=2)
    after = (random / "diagnosis.json").stat().st_mtime + 10
    os.utime(plain / "model.safetensors", (after, after))
    os.utime(plain / "diagnosis.json", (after, after))
    assert examined([plain, random]) == ["bbb"]


def test_the_first_plain_run_is_the_baseline(
    digits_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: Callable
) -> None:
    random, one, two = copied(digits_runs[1], tmp_path, "random"), *(copied(digits_runs[0], tmp_path, n) for n in "ab")
    asked_for: list[Any] = []

    def heard(run: Run, *, baseline: Run | None = None, **_: Any) -> Any:
        asked_for.append((run.folder.name, baseline and baseline.folder.name))
        raise ValueError("nothing here")

    monkeypatch.setattr("credo.report.content.diagnose_run", heard)
    tree = parsed(render(gather([random, two, one], draws=2)))
    assert asked_for == [("random", "b"), ("b", None), ("a", None)]
    articles = tree.all("section", id="doctor")[0].all("article")
    said = [[line.text for line in article.all("p", class_="baseline")] for article in articles]
    assert said == [["Compared with the deterministic baseline b."], [], []]


def test_a_run_that_cannot_be_examined(
    digits_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: Callable
) -> None:
    def fails(run: Run, **options: Any) -> Any:
        raise ValueError("no <pulse>")

    monkeypatch.setattr("credo.report.content.diagnose_run", fails)
    tree = parsed(render(gather([copied(digits_runs[0], tmp_path)], draws=2)))
    assert "could not be examined: no <pulse>" in tree.all("section", id="doctor")[0].text
    assert tree.all("section", id="calibration")


def test_no_doctor(digits_runs: list[Path], tmp_path: Path) -> None:
    copy = copied(digits_runs[1], tmp_path)
    (copy / "diagnosis.json").write_text("not JSON")
    assert gather([copy], draws=2, doctor=False).runs[0].diagnosis is None
    with pytest.raises(ValueError, match=r"diagnosis\.json is not valid JSON"):
        gather([copy], draws=2)


def test_runs_of_the_same_name_are_told_apart(digits_runs: list[Path], tmp_path: Path) -> None:
    one, two = copied(digits_runs[0], tmp_path, "a/run"), copied(digits_runs[1], tmp_path, "b/run")
    assert [run.name for run in gather([one, two], draws=2, doctor=False).runs] == ["a/run", "b/run"]
    with pytest.raises(ValueError, match="was given twice"):
        gather([one, tmp_path / "a" / ".." / "a" / "run"], draws=2)
    with pytest.raises(ValueError, match="at least one run"):
        gather([])


def test_the_same_test_set_under_other_settings(digits_runs: list[Path], tmp_path: Path) -> None:
    """A different way to write the same thing is no different data."""
    copy = copied(digits_runs[0], tmp_path)
    config = (copy / "config.toml").read_text().replace('name = "digits"', 'name = "digits"\nroot = "elsewhere"')
    (copy / "config.toml").write_text(config)
    assert Run(copy).experiment().data != Run(digits_runs[0]).experiment().data
    assert len(gather([digits_runs[0], copy], draws=2, doctor=False).runs) == 2


def test_progress_counts_inputs(digits_runs: list[Path]) -> None:
    heard: list[tuple[str, int, int]] = []
    gather(digits_runs, ood=[OOD], draws=2, doctor=False, on_progress=lambda *said: heard.append(said))
    total = 2 * (359 + 1000)
    assert heard[-1] == ("predicting with bbb", total, total)
    assert [done for _, done, _ in heard] == sorted({done for _, done, _ in heard})
    assert {what for what, _, _ in heard} == {"predicting with map", "predicting with bbb"}


def test_runs_on_different_data_raise(digits_runs: list[Path], gap_runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"gap.*was trained on gap \(n=100, noise=0\.1, seed=0\), .*map on digits: .*one report for each",
    ):
        gather([digits_runs[0], gap_runs[0]])
    other = tmp_path / "other"
    training = {"epochs": 1}
    data = {"name": "gap", "n": 100, "seed": 1}
    for _ in Run(other).train(
        make_experiment({"data": data, "training": training, "method": {"name": "map"}}), draws=1
    ):
        pass
    with pytest.raises(ValueError, match=r"other was trained on gap \(n=100, noise=0\.1, seed=1\)"):
        gather([gap_runs[0], other])


def test_ood_inputs_must_have_the_same_shape(digits_runs: list[Path], gap_runs: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"moons has inputs of shape \(2,\), the runs were trained on \(1, 8, 8\)"):
        gather(digits_runs, ood=["moons"])
    with pytest.raises(ValueError, match="these runs are regressions"):
        gather(gap_runs, ood=["gap"])
    with pytest.raises(ValueError, match="Did you mean 'photo-patches'"):
        gather(digits_runs, ood=["photo-patch"])


def test_several_ood_sets(digits_runs: list[Path], monkeypatch: pytest.MonkeyPatch, parsed: Callable) -> None:
    from credo.data.files import DatasetSpec
    from credo.data.registry import DATASETS

    noise = load_dataset(OOD, n=50, seed=3)
    noise = replace(noise, test=Split(noise.test.x, noise.test.y + 90), classes=100)  # more classes than digits have
    monkeypatch.setitem(DATASETS, "noise", DatasetSpec("Noise", "classification", lambda: noise))
    tree = parsed(render(gather(digits_runs, ood=[OOD, "noise", OOD], draws=2, doctor=False)))
    keys = [cell.attributes["data-key"] for cell in tree.all("tr", data_run="bbb")[0].all("td")]
    assert keys[4:6] == [f"ood {OOD}", "ood noise"]
    legend = tree.all("section", id="certainty")[0].all("ul", class_="legend")[0]
    assert [entry.text for entry in legend.all("li")] == ["digits (test)", f"{OOD} (OOD)", "noise (OOD)"]


def test_runs_that_are_not_finished(digits_runs: list[Path], tmp_path: Path) -> None:
    copy = copied(digits_runs[0], tmp_path)
    (copy / "result.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"copy is not finished; `credo train` resumes it"):
        gather([digits_runs[1], copy])
    with pytest.raises(FileNotFoundError, match="nothing is no run"):
        gather([tmp_path / "nothing"])
    whole = copied(digits_runs[0], tmp_path, "whole")
    (whole / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no trained model"):
        gather([whole])


def test_a_network_that_says_nan_is_named(digits_runs: list[Path], tmp_path: Path) -> None:
    from credo.training import load, save

    copy = copied(digits_runs[0], tmp_path, "broken")
    posterior = load(copy / "model.safetensors")
    with torch.no_grad():
        for parameter in posterior.model.parameters():
            parameter.fill_(1e38)  # NaN itself is not saved
    save(posterior, copy / "model.safetensors", extra=Run(copy).facts())
    with pytest.raises(ValueError, match=r"broken: .*(NaN|nan)"):
        gather([digits_runs[1], copy], draws=2, doctor=False)


def test_too_few_draws(digits_runs: list[Path]) -> None:
    with pytest.raises(ValueError, match="draws=0"):
        gather(digits_runs, draws=0)
