"""What the built site consists of: every page is in the navigation, every public name in the API reference."""

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from pages import ROOT

import credo


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(entries: Any) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else targets(value)


def navigation() -> set[str]:
    return set(targets(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))


def test_every_page_is_in_the_navigation() -> None:
    missing = sorted({path.name for path in (ROOT / "docs").glob("*.md")} - navigation())
    assert missing == [], f"add {missing} to a group of `nav` in zensical.toml"


def test_the_navigation_leads_to_pages_that_exist(site: ModuleType) -> None:
    made = {*site.copies().values(), "examples/index.md", *(f"api/{name}" for name in site.reference())}
    assert sorted(navigation() - made) == []
    assert {f"api/{name}" for name in site.reference()} <= navigation()


def test_every_public_name_is_in_the_reference(site: ModuleType) -> None:
    pages = site.reference()
    named = set(re.findall(r"(?:::: |`)[\w.]+\.(\w+)", "\n".join(pages.values())))
    rooms = {page.removesuffix(".md") for page in pages}
    assert sorted(set(credo.__all__) - named - rooms - {"__version__"}) == []


def test_links_out_of_the_folder_lead_into_the_site(site: ModuleType) -> None:
    page = ROOT / "docs" / "index.md"
    text = (
        "[loop](../examples/own_loop.py) [all](../examples) [data](../results) [a](bbb.md#x)\n```python\n[a](b)\n```\n"
    )
    wanted = (
        "[loop](examples/own_loop-py.md) [all](examples/index.md) data (`results` in the repository) [a](bbb.md#x)\n"
    )
    assert site.rewritten(text, page, site.copies()) == wanted + "```python\n[a](b)\n```\n"


def test_every_finding_of_the_doctor_is_among_the_gotchas() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/credo/doctor").rglob("*.py"))
    names = set(re.findall(r'Finding\(\s*"([a-z-]+)"', sources))
    assert len(names) > 20
    listed = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", (ROOT / "docs" / "gotchas.md").read_text(encoding="utf-8")))
    assert sorted(names - listed) == []
