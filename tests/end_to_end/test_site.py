"""What the built site consists of: every page is in the navigation, every public name in the API reference."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import PROGRAMS, ROOT, run_command

import credo


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    before = list(sys.path)
    yield script("make_site")
    sys.path[:] = before


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


def test_numbered_items_keep_what_belongs_to_them(site: ModuleType) -> None:
    text = (
        "1. one\n\n   ```sh\n   1. code\n   ```\n\n   more\n2. two\n   still\n3. three\n\n"
        "text\n   x\n\n```\n1. a\n   b\n```\n"
    )
    wanted = (
        "1. one\n\n    ```sh\n    1. code\n    ```\n\n    more\n\n2. two\n    still\n\n3. three\n\n"
        "text\n   x\n\n```\n1. a\n   b\n```\n"
    )
    assert site.deepened(text) == wanted
    assert site.deepened("1. a\n   b\n2. c\n") == "1. a\n    b\n2. c\n"


def test_every_finding_of_the_doctor_is_among_the_gotchas() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/credo/doctor").rglob("*.py"))
    names = set(re.findall(r'Finding\(\s*"([a-z-]+)"', sources))
    assert len(names) > 20
    listed = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", (ROOT / "docs" / "gotchas.md").read_text(encoding="utf-8")))
    assert sorted(names - listed) == []


START = ("trained-network", "optimizers", "sklearn", "answers-you-can-rely-on", "distributed")


@pytest.mark.parametrize("page", START)
def test_the_pages_of_the_first_question_begin_with_ten_lines_and_their_output(page: str) -> None:
    assert f"]({page}.md)" in (ROOT / "docs/index.md").read_text(encoding="utf-8").split("## Install")[0]
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n<!-- output -->", text, flags=re.DOTALL)
    assert found is not None
    assert text.index("```") == found.start(), "the first block is not the one with an output"
    statements = [node for node in ast.walk(ast.parse(found.group(1))) if isinstance(node, ast.stmt)]
    assert sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in statements) <= 11


def test_notebooks_have_the_code_of_their_pages(tmp_path: Path) -> None:
    notebooks = script("make_notebooks")
    for path in notebooks.write(tmp_path):
        book = json.loads(path.read_text(encoding="utf-8"))
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
        kinds = {"markdown": {"source"}, "code": {"source", "outputs", "execution_count"}}
        for cell in book["cells"]:
            assert set(cell) == {"id", "cell_type", "metadata"} | kinds[cell["cell_type"]]
        page = (ROOT / "docs" / f"{path.stem}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"(?:(<!-- not run[^\n]*)\n)?```python\n(.*?)```", page, flags=re.DOTALL)
        wanted = [code.rstrip("\n") for skipped, code in blocks if not skipped]
        code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
        assert [one for one in code if not one.startswith("!")] == wanted
        printed = [cell for cell in book["cells"] if cell.get("outputs")]
        assert len(printed) == page.count("<!-- output -->")


@pytest.mark.grid  # test_docs.py runs the same code, block by block
@pytest.mark.usefixtures("own_place")
@pytest.mark.parametrize("name", script("make_notebooks").TUTORIALS)
def test_a_notebook_runs_from_top_to_bottom(name: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in script("make_notebooks").notebook(ROOT / "docs" / f"{name}.md")["cells"]:
        if cell["cell_type"] == "code" and cell["source"][0].startswith("!"):
            for line in "".join(cell["source"]).splitlines():
                if line.startswith(tuple(f"!{program}" for program in PROGRAMS)):
                    run_command(line.removeprefix("!"), name)
        elif cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name} {cell['id']}", "exec", dont_inherit=True), names)


def test_every_tutorial_is_a_notebook(site: ModuleType) -> None:
    listed = re.findall(
        r"^\| [^|]+ \| \[[^\]]+\]\(([\w-]+)\.md\) \|$", (ROOT / "docs/tutorials.md").read_text(), flags=re.M
    )
    assert tuple(sorted(listed)) == tuple(sorted(site.make_notebooks.TUTORIALS))
    assert "(notebooks/auto.ipynb)" in site.with_notebook("# Title\n\nText\n", "auto.md")
    assert site.with_notebook("# Title\n", "gan.md") == "# Title\n"


def test_a_broken_link_and_a_foreign_script_are_noticed(tmp_path: Path) -> None:
    check = script("check_site")
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#no">1</a><a href="c.html">2</a><a href="#top">3</a>'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#top">1</a><script src="https://x.org/y.js"></script>')
    assert check.problems(tmp_path) == [
        "a.html: b.html#no: there is no such heading",
        "a.html: c.html leads nowhere",
        "b.html: loads https://x.org/y.js from elsewhere",
    ]


CITED = re.compile(r"([A-ZŁ][\w'-]+)((?: and [A-Z][\w'-]+)?(?: et al\.)?,? \(?(?:19|20)\d\d)")


def test_what_pages_cite_is_among_the_references() -> None:
    references = re.findall(
        r"^- \*\*(.+?)\.\*\*", (ROOT / "docs/references.md").read_text(encoding="utf-8"), flags=re.M
    )
    known = {(entry.split()[0], entry.split()[-1]) for entry in references}
    missing = set()
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"```.*?```|\s+", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, rest in CITED.findall(text):
            if " et al." in rest and (name, rest[-4:]) not in known:
                missing.add(f"{page.name}: {name}{rest}")
    assert sorted(missing) == []


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPENED = """<!DOCTYPE html><div class="md-header"><label for="__search"></label></div>
<div class="md-typeset__scrollwrap" style="overflow: auto; width: 50px"><div style="width: 500px">wide</div></div>
<div class="md-typeset__scrollwrap" style="overflow: auto; width: 50px"><div style="width: 5px"></div></div>
<script src="offline_worker.js"></script><script src="keyboard.js"></script>
<script>
  const worker = new Worker("worker.js"), asked = { text: "laplace" };
  worker.onmessage = event => document.body.dataset.found = `${asked.text} ${event.data.answer}`;
  worker.postMessage(asked);
</script>"""
WORKER = (
    'addEventListener("message", e => { e.data.text = ""; const m = { answer: "yes" }; postMessage(m); m.answer = "" })'
)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_page_from_disk_searches_and_is_used_by_the_keyboard(tmp_path: Path) -> None:
    for name in ("offline_worker.js", "keyboard.js"):
        shutil.copyfile(ROOT / "docs" / name, tmp_path / name)
    (tmp_path / "page.html").write_text(OPENED, encoding="utf-8")
    (tmp_path / "worker.js").write_text(WORKER, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--virtual-time-budget=2000",
    ]
    command = [
        f"{CHROMIUM}",
        *flags,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert 'data-found="laplace yes"' in page, "the page and its search share no object"
    assert page.count('tabindex="0"') == 2, "the search of narrow screens, and the table that scrolls"
