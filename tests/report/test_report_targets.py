"""Reports of runs whose targets are counts, values with outliers, labels, times and quantiles."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credo.cli.app import app

RNG = torch.Generator().manual_seed(0)
X = torch.randn(120, 3, generator=RNG)
TARGETS = {
    "poisson": torch.poisson(torch.exp(0.5 * X[:, :1]), generator=RNG),
    "negative-binomial": torch.poisson(torch.exp(0.5 * X[:, :2]), generator=RNG),
    "student-t": X[:, :1],
    "mixture-density": X[:, :1],
    "multi-label": (X > 0).float(),
    "quantiles": X[:, :1],
    "censored-times": torch.stack([torch.exp(0.3 * X[:, 0]), (X[:, 1] > 0).float()], 1),
}


def credo(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def trained(kind: str) -> None:
    np.savez("data.npz", x=X.numpy(), y=TARGETS[kind].numpy())
    more = ["method.likelihood.components=2"] if kind == "mixture-density" else []
    settings = [f"method.likelihood.kind={kind}", *more, "method.name=bbb", "training.epochs=1", "model.hidden=[8]"]
    assert credo("train", "data.npz", *settings, "--draws", "4", "--run", "run")[0] == 0


@pytest.mark.part(1)
@pytest.mark.parametrize("kind", ["poisson", "negative-binomial", "student-t", "mixture-density"])
def test_values_and_counts_have_a_report_with_the_doctors_findings(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(kind)
    code, output = credo("report", "run", "--draws", "4", "--out", "page.html")
    assert code == 0, output
    page = Path("page.html").read_text()
    assert "could not be examined" not in page
    assert "CRPS" in page
    assert "Coverage" in page


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("multi-label", "MultiLabelPrediction"),
        ("quantiles", "QuantilePrediction"),
        ("censored-times", "censored times"),
    ],
)
def test_what_has_no_figures_is_said_and_where_its_metrics_are(
    kind: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(kind)
    code, output = credo("report", "run", "--draws", "4")
    assert code != 0
    assert what in output
    assert "credo evaluate" in output
    assert credo("evaluate", "run", "--draws", "4")[0] == 0
    code, output = credo("doctor", "run")
    assert ("error" not in output) if kind == "multi-label" else (code != 0 and "credo.measure" in output)
