"""Kill workers of a training at random moments, again and again, and compare what comes out with undisturbed runs.

    python -m benchmarks.kill_workers --times 10

Two workers under `torchrun --max-restarts` train on the bundled digits. After each start one of them gets a SIGKILL
at a random moment: while it imports, loads, steps, validates or writes. After each kill all checkpoints on disk are
read. Beside it: the same run left alone, and with other seeds, which is the noise to judge a difference by. Exit code
1 if fewer workers were killed, or none behind a checkpoint, if a checkpoint could not be read, or if the numbers are
not those of the run left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from credo.core.errors import FileFormatError
from credo.core.support.files import earlier, write_json
from credo.experiments.runs import versions
from credo.training.files.checkpoint import load_checkpoint

METRICS = ("accuracy", "nll", "ece")


def command(folder: Path, options: argparse.Namespace, seed: int, restarts: int) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    settings = {
        "method.name": options.method,
        "model.hidden": "[64]",
        "training.epochs": options.epochs,
        "training.batch_size": 32,
        "training.schedule": "cosine",
        "training.seed": seed,
        "training.checkpoint_every": options.every,
    }
    train = ["train", *(f"{key}={value}" for key, value in settings.items()), "--run", str(folder)]
    return [sys.executable, "-m", *launcher, "--monitor-interval=0.2", "-m", "--", "credo", *train]


def start(folder: Path, options: argparse.Namespace, seed: int = 0, restarts: int = 0) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = folder.with_suffix(".log").open("wb")
    return subprocess.Popen(command(folder, options, seed, restarts), env=environment, stdout=log, stderr=log)


def workers(launcher: subprocess.Popen[bytes]) -> list[int]:
    tasks = Path(f"/proc/{launcher.pid}/task")
    lists = [path.read_text().split() for path in tasks.glob("*/children")] if tasks.exists() else []
    return sorted(int(pid) for listed in lists for pid in listed)


def new_workers(launcher: subprocess.Popen[bytes], old: list[int]) -> list[int]:
    """The next pair of workers, once both are there; none if the launcher has ended."""
    while launcher.poll() is None:
        found = [pid for pid in workers(launcher) if pid not in old]
        if len(found) == 2:
            return found
        time.sleep(0.02)
    return []


def place_of(folder: Path) -> dict[str, Any]:
    """How far the newest checkpoint is, how many can be read, and what is wrong with those that cannot."""
    found: dict[str, Any] = {"epoch": None, "step": None, "readable": 0, "unreadable": []}
    for path in (earlier(folder / "checkpoint.pt", age) for age in (0, 1)):
        if not path.exists():
            continue
        try:
            progress = load_checkpoint(path)["progress"]
        except (FileFormatError, OSError) as error:
            found["unreadable"].append(str(error))
            continue
        found["readable"] += 1
        if found["epoch"] is None:
            found |= {"epoch": progress["epoch"], "step": progress["step"]}
    return found


def is_alive(pid: int) -> bool:
    """Whether it is there and has not ended: one that has is no kill of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def disturbed(folder: Path, options: argparse.Namespace, chance: random.Random) -> list[dict[str, Any]]:
    """Train, killing workers on the way; what each kill before the training was done met."""
    launcher, old = start(folder, options, restarts=options.times), list[int]()
    kills: list[dict[str, Any]] = []
    while len(kills) < options.times:
        pair = new_workers(launcher, old)
        if not pair:
            break
        old += pair
        wait, rank = chance.uniform(0, options.span), chance.randrange(2)
        try:
            launcher.wait(wait)
            break
        except subprocess.TimeoutExpired:
            pass
        if not is_alive(pair[rank]):
            continue  # it was done, or its partner failed: not our kill
        os.kill(pair[rank], signal.SIGKILL)
        kills.append({"rank": rank, "seconds": wait, **place_of(folder)})
        print(f"kill {len(kills)}: {in_words(kills[-1])}", flush=True)
    if launcher.wait() != 0:
        sys.exit(f"The training failed with {launcher.returncode}: see {folder.with_suffix('.log')}.")
    return kills


def in_words(kill: dict[str, Any]) -> str:
    where = "no checkpoint yet"
    if kill["epoch"] is not None:
        where = f"checkpoint at epoch {kill['epoch']}, step {kill['step']}; {kill['readable']} readable"
    return "; ".join([f"rank {kill['rank']}, {kill['seconds']:.1f} s after its start", where, *kill["unreadable"]])


def result(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "result.json").read_text())
    return {"seed": found["seed"], "epochs": found["epochs"], **{name: found["test"][name] for name in METRICS}}


def undisturbed(folder: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    if start(folder, options, seed).wait() != 0:
        sys.exit(f"The training failed: see {folder.with_suffix('.log')}.")
    return result(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="how many workers are killed")
    parser.add_argument("--method", default="vogn")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument(
        "--span", type=float, default=20.0, help="a worker is killed within so many seconds of its start"
    )
    parser.add_argument("--seeds", type=int, default=3, help="undisturbed runs, one a seed; the first is compared with")
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, help="how far a number may be from the undisturbed one"
    )
    parser.add_argument("--chance", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, default=None, help="where runs go; a temporary folder by default")
    parser.add_argument("--json", type=Path, default=None, help="also write all numbers there")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds: at least one undisturbed run is needed to compare with")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-workers-"))
    folder.mkdir(parents=True, exist_ok=True)
    kills = disturbed(folder / "killed", options, random.Random(options.chance))
    rows = {f"killed {len(kills)} times": result(folder / "killed")}
    for seed in range(options.seeds):
        rows[f"undisturbed, seed {seed}"] = undisturbed(folder / f"seed-{seed}", options, seed)
    record = make_record(options, kills, list(rows.values()))
    print(f"\n{'':24}" + "".join(f"{name:>12}" for name in METRICS))
    for name, row in {**rows, "killed − undisturbed": record["differences"]}.items():
        print(f"{name:24}" + "".join(f"{row[metric]:12.6f}" for metric in METRICS))
    if options.json is not None:
        write_json(options.json, record)
    if record["failures"]:
        sys.exit("\n".join(record["failures"]))


def make_record(options: argparse.Namespace, kills: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All numbers, and what went wrong; `rows` are the disturbed run and those left alone, its own seed first."""
    disturbed, same, *others = rows
    differences = {name: disturbed[name] - same[name] for name in METRICS}
    failures = [f"A checkpoint could not be read: {text}" for kill in kills for text in kill["unreadable"]]
    if len(kills) < options.times:
        failures.append(
            f"Only {len(kills)} of {options.times} workers were killed before the training was done: give more "
            "--epochs or a shorter --span."
        )
    if all(kill["epoch"] is None for kill in kills):
        failures.append("No worker was killed behind a checkpoint, so nothing was resumed: give a longer --span.")
    failures += [
        f"{name} is {disturbed[name]}, undisturbed {same[name]}: more than {options.tolerance} apart."
        for name, difference in differences.items()
        if not abs(difference) <= options.tolerance
    ]
    if disturbed["epochs"] != same["epochs"]:
        failures.append(f"{disturbed['epochs']} epochs were trained, undisturbed {same['epochs']}.")
    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "kills": kills,
        "disturbed": disturbed,
        "undisturbed": [same, *others],
        "differences": differences,
        "failures": failures,
        "versions": versions(),
    }


if __name__ == "__main__":
    main()
