"""The table of what each option after training cost and gave, from the records of `benchmarks.after_training`."""

from __future__ import annotations

from pathlib import Path


def write_tables(folder: Path) -> None:
    """Make the table of the records in a folder."""
