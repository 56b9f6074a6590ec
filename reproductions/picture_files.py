"""Write pictures reproducibly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from credo.core.support.files import write_atomically


def save_picture(picture: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG, SVG or PDF, by the suffix; the same figure gives the same bytes."""
    kind = path.suffix.removeprefix(".").lower()
    stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    write_atomically(path, lambda temporary: picture.savefig(temporary, format=kind, dpi=90, metadata=stamp))
