"""constraints.txt holds an exact version of everything that `make test` installs, and of nothing else."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Elsewhere some packages need others.
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info[:2] != (3, 11), reason="the versions are those of Linux and Python 3.11"
)
ROOT = Path(__file__).parent.parent
EXTRAS = ("dev", "cli", "report", "sklearn", "export", "integrations")  # as in the Makefile


def roots() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for name in EXTRAS for text in project["optional-dependencies"][name]]
    return [Requirement(text) for text in (*project["dependencies"], *extras)]


def pins() -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][\w.]*)", line) for line in lines if line]
    assert all(found), "each line is name==version"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def needed() -> set[str]:
    """Names of the requirements and of all that they require here, by the metadata of what is installed."""
    seen: set[tuple[str, str]] = set()
    waiting = roots()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in metadata.requires(name) or ():
                one = Requirement(text)
                if one.marker is None or one.marker.evaluate({"extra": extra}):
                    waiting.append(one)
    return {name for name, _ in seen}


def test_all_that_is_installed_has_its_version() -> None:
    assert needed() - set(pins()) == set()


def test_nothing_else_has_one() -> None:
    assert set(pins()) - needed() == set()


def test_the_makefile_installs_these_extras() -> None:
    assert f".[{','.join(EXTRAS)}]" in (ROOT / "Makefile").read_text()


def test_the_versions_are_ones_that_the_project_allows() -> None:
    found = pins()
    for requirement in roots():
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement
