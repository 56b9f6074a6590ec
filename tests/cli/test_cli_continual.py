"""`credo continual` from a file or from keys, resumed, refused; its report."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.continual import learn_jointly
from credo.experiments.continual import make_continual
from credo.experiments.continual import sequence as continual
from credo.report.continual import render_continual

Call = Callable[..., Any]
Refused = Callable[..., str]
QUICK = ("training.epochs=2", "model.hidden=[16]", "continual.count=2", "continual.draws=4", "--run", "seq")


def test_a_sequence_from_end_to_end(call: Call) -> None:
    shown = call("continual", *QUICK)
    result = json.loads(Path("seq/result.json").read_text())
    assert [len(row) for row in result["matrix"]] == [1, 2]
    assert result["summary"]["accuracy"] == pytest.approx(sum(result["matrix"][1]) / 2)
    assert result["summary"]["backward_transfer"] == pytest.approx(result["matrix"][1][0] - result["matrix"][0][0])
    assert f"{result['matrix'][1][0]:.4f}" in shown.stdout
    assert "permutation 2" in shown.stdout
    page = Path("seq/report.html").read_text()
    assert page.count("<tr>") == 3
    assert "permutation 1" in page
    again = json.loads(call("continual", *QUICK, "--json").stdout)
    assert again == result


def test_a_file_with_every_section(call: Call) -> None:
    Path("exp.toml").write_text(
        '[continual]\ntasks = "split"\ncount = 5\nalone = true\njoint = true\n[model]\nname = "mlp"\nhidden = [16]\n'
        '[method]\nname = "bbb"\nlr = 0.01\n[training]\nepochs = 1\n'
    )
    result = json.loads(call("continual", "exp.toml", "training.batch_size=64", "--json").stdout)
    assert len(result["alone"]) == len(result["joint"]) == 5
    assert result["summary"]["joint_accuracy"] == pytest.approx(sum(result["joint"]) / 5)
    assert min(result["joint"]) > 0.5
    gains = [result["matrix"][i][i] - result["alone"][i] for i in range(1, 5)]
    assert result["summary"]["forward_transfer"] == pytest.approx(sum(gains) / 4)
    assert result["training"]["batch_size"] == 64
    assert Path("runs/continual-digits-split-bbb/report.html").exists()


@pytest.mark.parametrize("method", [(), ("method.name=map", "continual.carry=fisher", "continual.joint=true")])
def test_the_recorded_settings_make_the_same_sequence(call: Call, method: tuple[str, ...]) -> None:
    call("continual", *QUICK, *method)
    first = json.loads(Path("seq/result.json").read_text())
    again = json.loads(call("continual", "seq/config.toml", "--run", "again", "--json").stdout)
    assert Path("again/config.toml").read_text() == Path("seq/config.toml").read_text()
    assert (again["matrix"], again["joint"]) == (first["matrix"], first["joint"])
    call("continual", "seq/config.toml", "--run", "seq")


def test_all_at_once_goes_on_from_its_last_epoch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("continual", *QUICK, "continual.joint=true", "method.name=map", "continual.carry=nothing")
    call(*asked)
    whole = json.loads(Path("seq/result.json").read_text())["joint"]
    shutil.rmtree("seq")
    seen = []

    def killed(learner: Any, tasks: Any, **options: Any) -> Any:
        for record in learn_jointly(learner, tasks, **options):
            seen.append(record.epoch)
            if len(seen) == 1:
                raise ValueError("killed")
            yield record

    monkeypatch.setattr(continual, "learn_jointly", killed)
    call(*asked, code=2)
    assert Path("seq/joint.pt").exists()
    call(*asked)
    assert seen == [1, 1, 2], "the first epoch is only read again"
    assert json.loads(Path("seq/result.json").read_text())["joint"] == whole


def test_naming_the_default_method_changes_nothing(call: Call) -> None:
    result = json.loads(call("continual", *QUICK, "method.name=vogn", "--json").stdout)
    assert (result["method"]["damping"], result["method"]["curvature"]["init"]) == (0.0, 0.1)


def test_other_settings_do_not_go_into_the_same_folder(call: Call, refused: Refused) -> None:
    call("continual", *QUICK)
    assert "other settings" in refused("continual", *QUICK, "training.seed=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("continual.task=split",), "continual"),
        (("continual.tasks=rotated",), "permuted"),
        (("continual.carry=memory",), "fisher"),
        (("method.name=map",), "carry=fisher"),
        (("method.name=vogn", "method.prior_precision=3"), "continual.prior"),
        (("method.name=ensemble", "continual.carry=nothing"), "takes no prior"),
        (("continual.count=3", "continual.tasks=split"), "equal size"),
        (("continual=3",), "must be a section"),
        (("method=vogn",), "must be a section"),
        (("training.examples=100",), "does not apply"),
        (("continual.draws=0",), "draws"),
        (("none.toml",), "There is no file"),
        ((".",), ". is a folder. Give a TOML file"),
        (("a.toml", "b.toml"), "At most one TOML file"),
    ],
)
def test_what_makes_no_sequence_is_refused(refused: Refused, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("continual", *arguments)


def test_a_refused_command_leaves_the_folder_free(call: Call, refused: Refused) -> None:
    split = ("continual.tasks=split", "training.epochs=1", "model.hidden=[8]", "--run", "seq")
    refused("continual", *split, "continual.count=3")
    call("continual", *split, "training.schedule=steps", "training.milestones=[1]", "continual.count=5")
    page = Path("seq/report.html").read_text()
    assert page.count("<path ") == 5  # four tasks that others followed, and their mean


def test_names_of_tasks_are_escaped_in_the_report() -> None:
    given = make_continual({}).to_dict()
    result = {**given, "tasks": ["<b>"], "matrix": [[0.5]], "seconds": [1.0], "summary": {"accuracy": 0.5}}
    page = render_continual(result)
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
