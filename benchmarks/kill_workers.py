"""Kill workers of a training at random moments, again and again, and compare what comes out with undisturbed runs.

    python -m benchmarks.kill_workers --times 10

Two workers under `torchrun --max-restarts` train on the bundled digits. After each start one of them gets a SIGKILL
at a random moment: while it imports, loads, steps, validates or writes. After each kill all checkpoints on disk are
read. Beside it: the same run left alone, and with other seeds, which is the noise to judge a difference by.
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

from credo.core.files import earlier
from credo.training.checkpoint import load_checkpoint

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


def place_of(folder: Path) -> str:
    """How far the checkpoint is; reading it and the one before fails if any is damaged."""
    states = [
        load_checkpoint(path) for path in (earlier(folder / "checkpoint.pt", age) for age in (0, 1)) if path.exists()
    ]
    if not states:
        return "no checkpoint yet"
    progress = states[0]["progress"]
    return f"checkpoint at epoch {progress['epoch']}, step {progress['step']}; {len(states)} readable"


def disturbed(folder: Path, options: argparse.Namespace, chance: random.Random) -> int:
    """Train, killing workers on the way; how many were killed before the training was done."""
    launcher, killed, old = start(folder, options, restarts=options.times), 0, []
    while killed < options.times:
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
        try:
            os.kill(pair[rank], signal.SIGKILL)
        except ProcessLookupError:
            continue  # it was done, or its partner failed: not our kill
        killed += 1
        print(f"kill {killed}: rank {rank}, {wait:.1f} s after its start; {place_of(folder)}", flush=True)
    if launcher.wait() != 0:
        sys.exit(f"The training failed with {launcher.returncode}: see {folder.with_suffix('.log')}.")
    return killed


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
    parser.add_argument("--seeds", type=int, default=3, help="undisturbed runs to compare with, one a seed")
    parser.add_argument("--chance", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, default=None, help="where runs go; a temporary folder by default")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers there")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-workers-"))
    folder.mkdir(parents=True, exist_ok=True)
    killed = disturbed(folder / "killed", options, random.Random(options.chance))
    rows = {f"killed {killed} times": result(folder / "killed")}
    for seed in range(options.seeds):
        rows[f"undisturbed, seed {seed}"] = undisturbed(folder / f"seed-{seed}", options, seed)
    print(f"\n{'':24}" + "".join(f"{name:>12}" for name in METRICS))
    for name, row in rows.items():
        print(f"{name:24}" + "".join(f"{row[metric]:12.6f}" for metric in METRICS))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
