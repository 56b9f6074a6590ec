"""What several test files share is in tests/helpers, importable by its plain name; the long tests come first."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELPERS = HERE / "helpers"
sys.path.append(str(HELPERS))
pytest.register_assert_rewrite(*(path.stem for path in HELPERS.glob("*.py")))

# Folders whose tests start processes, or run whole pages and examples.
LONG = {"distributed", "end_to_end"}


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while tests are found: modules and tests live to the end, and are many."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let no later search for garbage look at them again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """No test survives a power failure: files are written, but not waited for until the disk has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the long folders, and put files with slow tests first: no worker ends alone with one of them.

    Whole files, so that what their tests share is not made twice.
    """
    _leave_parts(items)
    for item in items:
        if item.path.relative_to(HERE).parts[0] in LONG:
            item.add_marker(pytest.mark.slow)
    first = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in first)


def _leave_parts(items: list[pytest.Item]) -> None:
    """Of the cases of a test with `part(n)`, leave n, spread evenly; the others get the mark `grid`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("part") and not item.get_closest_marker("grid"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        (wanted,) = found[0].get_closest_marker("part").args
        left = {round(index * (len(found) - 1) / max(1, wanted - 1)) for index in range(wanted)}  # first and last too
        for index, item in enumerate(found):
            if index not in left:
                item.add_marker(pytest.mark.grid)
