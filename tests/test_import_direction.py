"""Imports between the folders point one way; importing the package has no other effect; the library prints nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import credo

SOURCE = Path(credo.__file__).parent
ORDER = (
    "core",
    "methods",
    "predict",
    "evaluate",
    "detection",
    "calibration",
    "attacks",
    "compress",
    "doctor",
    "data",
    "models",
    "training",
    "tuning",
    "exporting",
    "continual",
    "experiments",
    "report",
    "sklearn",
    "integrations",
    "cli",
)


def imported(path: Path) -> Iterator[list[str]]:
    """Everything of ours that a file imports, anywhere in it, as parts of the dotted name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        origin = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
        yield from (parts for parts in ((origin + name).split(".") for name in names) if parts[0] in ("credo", ""))


def test_imports_point_one_way() -> None:
    folders = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*/*.py")}
    assert folders <= set(ORDER)
    assert {"core", "cli"} <= folders
    allowed = {folder: {"version", *ORDER[: place + 1]} for place, folder in enumerate(ORDER)}
    allowed["integrations"].add("optim")  # which needs no more than methods
    wrong = [
        f"{path.relative_to(SOURCE)} imports {'.'.join(parts)}"
        for path in SOURCE.rglob("*/*.py")
        for parts in imported(path)
        if parts[0] == "" or (parts[1:] or [""])[0] not in allowed[path.relative_to(SOURCE).parts[0]]
    ]
    assert wrong == []


def test_no_module_calls_print() -> None:
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


IMPORT_ALL = """
import importlib, pkgutil, random
import numpy, torch
def state():
    kind, keys, place, *rest = numpy.random.get_state()
    return (kind, keys.tolist(), place, *rest), torch.get_rng_state().tolist(), torch.initial_seed()
before, plain = state(), random.getstate()
import credo
assert random.getstate() == plain, "import credo moved Python's generator"
for module in pkgutil.walk_packages(credo.__path__, "credo."):
    importlib.import_module(module.name)  # rich, which the command line imports, draws from Python's
assert state() == before, "importing moved NumPy's or torch's generator"
"""


def test_importing_prints_nothing_and_leaves_global_generators_alone() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
