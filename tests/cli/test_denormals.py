"""The command computes with no denormal numbers, in all threads; the library leaves the process as it is."""

import subprocess
import sys

import pytest
import torch
from pages import ROOT

from reproductions.jobs import _start_worker

PROGRAM = """
import sys
import torch
from credo.cli.app import main

def tiny():
    return int((torch.full((1_000_000,), 1e-40) * 0.5).count_nonzero())

torch.set_num_threads(2)
print(tiny())
sys.argv = ["credo", "list", "--help"]
try:
    main()
except SystemExit:
    pass
print(tiny())
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In the checkout, where `reproductions` can be imported."""
    arguments = [sys.executable, "-c", program]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)


def test_the_command_flushes_them_in_all_threads() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    before, *_, after = done.stdout.split()
    assert (before, after) == ("1000000", "0")


def test_a_worker_of_a_reproduction_does_so_too() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")
    threads = torch.get_num_threads()
    try:
        _start_worker()
        assert float(torch.tensor(1e-40) * 0.5) == 0
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert float(torch.tensor(1e-40) * 0.5) > 0


@pytest.mark.grid
def test_the_command_of_reproductions_does_so_too() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")
    program = PROGRAM.replace("credo.cli.app", "reproductions.command").replace('"--help"', '"--json"')
    done = run(program)
    assert done.returncode == 0, done.stderr
    before, *shown, after = done.stdout.split()
    assert (before, after) == ("1000000", "0")
    assert '"vogn":' in shown
