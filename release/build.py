"""Build the sdist and the wheel into dist/: the same commit gives the same bytes, whoever builds it and when.

`make wheel` runs this in an environment with constraints-release.txt. The wheel is built from the sdist. Times are
those of SOURCE_DATE_EPOCH, by default the commit's; setuptools leaves the times and owners of the sdist's files to the
machine, so it is packed again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit_time() -> str:
    """Return the time of the commit in seconds since 1970, or 1980-01-01 outside a repository."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "315532800"


def repacked(sdist: bytes, time: int) -> bytes:
    """Return a .tar.gz with the same files, sorted, of nobody and of one time.

    Args:
        sdist: The archive.
        time: Seconds since 1970.
    """
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist), mode="r:gz") as given,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in sorted(given.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            made.addfile(member, given.extractfile(member) if member.isfile() else None)
    return gzip.compress(plain.getvalue(), mtime=time)


def build(target: Path) -> list[Path]:
    """Build both and return their files.

    Args:
        target: The folder; what was in it is deleted.
    """
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    os.umask(0o022)  # modes of files are part of a wheel
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    for sdist in target.glob("*.tar.gz"):
        sdist.write_bytes(repacked(sdist.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))
    return sorted(target.iterdir())


if __name__ == "__main__":
    for file in build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"):
        print(hashlib.sha256(file.read_bytes()).hexdigest(), f"{file.stat().st_size / 1e6:.2f} MB", file.name)
