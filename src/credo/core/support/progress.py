"""A progress bar, on an interactive terminal only, and none where rich is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class NoBar:
    """What a rich progress bar is asked to do, done silently: a service needs no bar, and so not the package."""

    disable = True

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def add_task(self, description: str, **options: Any) -> int:
        """Return the number of a task that nobody sees."""
        return 0

    def update(self, task: int, **options: Any) -> None:
        """Show nothing."""

    def advance(self, task: int, advance: float = 1) -> None:
        """Show nothing."""


def make_progress(console: Console | None = None) -> Progress:
    """Return a bar on stderr with counts, elapsed and remaining time, and a text at the end.

    Args:
        console: Where to draw it; stderr by default.
    """
    try:
        from rich import progress
        from rich.console import Console
    except ModuleNotFoundError:
        return cast("Progress", NoBar())
    console = console or Console(stderr=True)
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[text]}", markup=False),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
