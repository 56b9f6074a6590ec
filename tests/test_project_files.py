"""The files around the code: version numbers that agree, a changelog in the form of keepachangelog.com."""

import re
from pathlib import Path

import credo

ROOT = Path(__file__).parent.parent
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", text, flags=re.MULTILINE) == [credo.__version__]


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\]( - (\d{4}-\d\d-\d\d|unreleased))?", line) for line in versions[1:])
    sections: list[list[str]] = []
    for line in lines:
        if line.startswith("## "):
            sections.append([])
        elif line.startswith("### "):
            sections[-1].append(line.removeprefix("### "))
    for found in sections:
        assert found == [kind for kind in KINDS if kind in found], "each kind once, in this order"
