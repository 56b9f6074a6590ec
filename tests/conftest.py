"""What several test files share is in tests/helpers, importable by its plain name; the long tests come first."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELPERS = HERE / "helpers"
sys.path.append(str(HELPERS))
pytest.register_assert_rewrite(*(path.stem for path in HELPERS.glob("*.py")))

# Folders whose tests start processes, or run whole pages and examples.
LONG = {"distributed", "end_to_end"}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the long folders, and put files with slow tests first: no worker ends alone with one of them.

    Whole files, so that what their tests share is not made twice.
    """
    for item in items:
        if item.path.relative_to(HERE).parts[0] in LONG:
            item.add_marker(pytest.mark.slow)
    first = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in first)
