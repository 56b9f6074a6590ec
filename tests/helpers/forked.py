"""Scripts in processes of their own that need not import torch: forks of a process that has done so.

An import of torch and of what its first optimiser needs costs more than most of these scripts do. The process that is
forked is `multiprocessing`'s own server; each worker of a parallel test run has one, from the first script on.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "sklearn.datasets", "credo.methods", "credo.cli.app"])


@contextmanager
def started(script: Path, *arguments: str, output: Path, environment: Mapping[str, str] = {}) -> Iterator[BaseProcess]:
    """`python SCRIPT ARGUMENTS…`, in the folder and environment of now; killed at the end if it lives then.

    Args:
        script: A file of Python.
        arguments: `sys.argv[1:]` there.
        output: A file for what it prints.
        environment: Variables that it has besides.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = FORKS.Process(target=_run, args=(str(script), arguments, str(output), settings, Path.cwd()))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def run(script: Path, *arguments: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`started`, to its end; what it prints is also in the folder."""
    output = folder / f"{script.stem}.log"
    with started(script, *arguments, output=output) as process:
        process.join(timeout)
        assert process.exitcode is not None, output.read_text()
        return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, output.read_text())


def _run(script: str, arguments: list[str], output: str, environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
