"""What works with torch, NumPy and safetensors alone, and what is said where another package is missing."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from credo.core.errors import MissingPackageError
from credo.core.support.extras import needs
from credo.core.support.progress import NoBar, make_progress

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = (
    *("rich", "typer", "click", "PIL", "filelock", "jinja2", "markupsafe", "sklearn", "scipy", "matplotlib"),
    *("onnx", "onnxscript", "onnxruntime", "transformers", "lightning", "accelerate", "peft"),
)
BLOCK = f"""
import sys

for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
"""
SERVE = """
import torch
from torch import nn

import credo
from credo.data import Batches, Split

x = torch.linspace(-1, 1, 32).unsqueeze(1)
network = lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))
batches = Batches(Split(x, (x[:, 0] > 0).long()), batch_size=8)
posterior = credo.VOGN(network(), data_size=32)
credo.fit(posterior, batches, epochs=2)
held_out = torch.linspace(-0.9, 0.9, 16).unsqueeze(1)
credo.calibrate(posterior, [(held_out, (held_out[:, 0] > 0).long())])
credo.save(posterior, "model.safetensors")
loaded = credo.load("model.safetensors", model=network())
assert credo.predict(loaded, x, draws=2).probs.shape == (32, 2)
assert credo.predictor(loaded, draws=2)(x).probs.shape == (32, 2)
laplace = credo.Laplace(loaded.model, data_size=32).fit(batches, progress=True)
assert credo.predict(laplace, x).probs.shape == (32, 2)
"""
USES = {
    "from credo.data import load_dataset; load_dataset('digits')": ("sklearn", "scikit-learn"),
    "import credo.sklearn": ("sklearn", "scikit-learn"),
    "import torch; from credo.core.likelihood.special_functions import student_cdf; student_cdf(3.0, torch.zeros(2))": (
        "sklearn",
        "scipy",
    ),
    "import credo.report": ("report", "jinja2"),
    "from pathlib import Path; from credo.data.image_folders import read_images\n"
    "read_images([Path('a.png')], size=None, grayscale=True)": ("cli", "pillow"),
    "import torch; from credo.data.corruptions.digital import jpeg; jpeg(torch.zeros(1, 1, 2, 2), 50, None)": (
        "cli",
        "pillow",
    ),
    "from pathlib import Path; from credo.experiments.folders import _locked\nwith _locked(Path('.')): pass": (
        "cli",
        "filelock",
    ),
    "from credo.cli import main; main()": ("cli", "typer"),
    "from credo.integrations import BayesTrainer": ("integrations", "transformers"),
    "from credo.integrations import BayesCallback": ("integrations", "lightning"),
    "import credo, sys, torch\n"
    "for name in ('filelock', 'jinja2', 'markupsafe'): del sys.modules[name]\n"  # torch.export needs them itself
    "m = credo.MAP(torch.nn.Linear(2, 2), data_size=4); credo.export(m, torch.zeros(2, 2), 'a.onnx')": (
        "export",
        "onnx",
    ),
}


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CREDO_KERNELS": "0"}
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_training_saving_and_predicting_need_three_packages(tmp_path: Path) -> None:
    done = run(SERVE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path) -> None:
    guarded = [
        f"try:\n    exec({code!r})\nexcept (credo.MissingPackageError, SystemExit) as error:\n    print(error)"
        for code in USES
    ]
    done = run("\n".join(["import credo", *guarded]), tmp_path)  # one process: each takes seconds to import torch
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(USES)
    for line, (extra, package) in zip(lines, USES.values(), strict=True):
        assert f" needs {package}" in line
        assert line.endswith(f": pip install 'credo[{extra}]'")


@pytest.mark.parametrize(("extra", "package"), sorted(set(USES.values())))
def test_the_extra_has_the_package(extra: str, package: str) -> None:
    named = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
    assert package in named


def test_the_extra_all_has_every_extra_of_users() -> None:
    (everything,) = (Requirement(text) for text in PROJECT["optional-dependencies"]["all"])
    assert everything.name == "credo"
    assert everything.extras == set(PROJECT["optional-dependencies"]) - {"all", "dev", "docs", "bench"}


def test_a_serving_image_needs_three_packages() -> None:
    assert [Requirement(text).name for text in PROJECT["dependencies"]] == ["torch", "numpy", "safetensors"]


def test_errors_of_credo_itself_stay() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"credo\.nowhere"), needs("cli", "This"):
        import credo.nowhere  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(MissingPackageError, match=r"^This needs nowhere, .*credo\[cli\]'$"), needs("cli", "This"):
        import nowhere.below  # type: ignore[import-not-found]  # noqa: F401


def test_without_rich_there_is_no_bar(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with make_progress() as bar:
        assert isinstance(bar, NoBar)
        task = bar.add_task("training", total=3, text="")
        bar.update(task, completed=1, text="loss")
        bar.advance(task)
    assert capfd.readouterr() == ("", "")
