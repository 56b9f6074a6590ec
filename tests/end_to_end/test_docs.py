"""The documentation as a reader uses it: every block is run, every link followed.

In a page, an HTML comment on the line before a block says how to treat it:

    <!-- continues -->        the block goes on with the names of the Python block before it
    <!-- output -->           the block is what the Python block before it printed (numbers: about)
    <!-- needs: names -->     the block runs by itself where all of these are there: packages, data sets, files of
                              CREDO_DATA
    <!-- not run: reason -->  the block is only shown; `NOT_RUN` counts these

Python blocks run in a fresh namespace. Of a shell block, lines that begin with `credo ` or `python -m reproductions`
run; `# exit code 2` at the end of a line says that it is meant to fail. A TOML block must be an experiment that could
run. All blocks of a page run in its order, in one empty folder.
"""

import contextlib
import dataclasses
import importlib.util
import io
import math
import os
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import PROGRAMS, ROOT, run_command

import credo
from credo.cli.app import COMMANDS
from credo.cli.catalogue.listing import catalogue
from credo.data import DataMissingError, load_dataset
from credo.data.registry import dataset_names
from credo.experiments.config import Training, make_experiment, prepare
from credo.methods.bbb.bbb import KL_NAMES, NOISE_NAMES
from credo.methods.bbb.init import MEAN_INITS
from credo.predict import DECOMPOSITIONS
from credo.predict.run import STRATEGIES
from reproductions import command
from reproductions.studies import STUDIES
from reproductions.study import ResultTable, Table

pytestmark = pytest.mark.usefixtures("own_place")
PAPERS = sorted((ROOT / "reproductions").glob("*/README.md"))
REPRODUCTIONS = sorted((ROOT / "reproductions").glob("**/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *REPRODUCTIONS]
# Blocks that are shown but not run. A new one must be entered here, with a reason in the page.
NOT_RUN = {
    "adversarial-sampling.md": 1,
    "attacks.md": 1,
    "bayesian-cnn.md": 1,
    "command-line.md": 3,
    "data-and-models.md": 1,
    "export.md": 1,
    "fidelity.md": 1,
    "hybrid-flow.md": 1,
    "migration.md": 5,
    "node-bnn.md": 2,
    "optimizers.md": 6,
    "out-of-distribution.md": 1,
    "results.md": 6,
    "sklearn.md": 3,
    "training.md": 1,
    "reproductions/README.md": 2,
    "reproductions/adversarial_sampling/README.md": 5,
    "reproductions/bayesian_cnn/README.md": 3,
    "reproductions/continual/README.md": 3,
    "reproductions/hcl/README.md": 5,
    "reproductions/node_bnn/README.md": 4,
    "reproductions/vogn/README.md": 2,
    "reproductions/weight_sampling/README.md": 4,
}
DATA = os.environ.get("CREDO_DATA")  # before a fixture hides it
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


def name_of(path: Path) -> str:
    """A page's name, with its folder if that is not docs."""
    return str(path.relative_to(ROOT)) if path in REPRODUCTIONS else path.name


def blocks_of(path: Path) -> list[Block]:
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    opened, mark = None, ""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if opened is None and text.startswith("```"):
            opened = number
        elif opened is not None and text == "```":
            code = textwrap.dedent("\n".join(lines[opened : number - 1]))
            language = lines[opened - 1].strip().removeprefix("```").strip()
            found.append(Block(name_of(path), opened + 1, language, code, mark))
            opened, mark = None, ""
        elif opened is None and text:
            comment = re.fullmatch(r"<!--\s*(.*?)\s*-->", text)
            mark = comment.group(1) if comment else ""
    assert opened is None, f"{path.name}: the block of line {opened} is never closed"
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_of_a_page_runs(path: Path) -> None:
    names: dict[str, Any] = {}
    printed = ""
    for block in blocks_of(path):
        if block.mark.startswith(("not run:", "needs:")):
            continue
        if block.language == "python":
            names = names if block.mark == "continues" else {"__name__": "__main__"}
            printed = run_python(block, names)
        elif block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.startswith(tuple(PROGRAMS)):
                    run_command(line, block.place)
        elif block.language == "toml":
            prepare(make_experiment(tomllib.loads(block.code)))
        elif block.mark == "output":
            check_output(printed, block)


NEEDY = [block for path in PAGES for block in blocks_of(path) if block.mark.startswith("needs:")]


@pytest.mark.slow
@pytest.mark.parametrize("block", NEEDY, ids=lambda block: block.place)
def test_a_block_that_needs_more_runs_where_that_is_there(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    if DATA is not None:
        monkeypatch.setenv("CREDO_DATA", DATA)
    missing = [name for name in block.mark.removeprefix("needs:").split() if not is_there(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed, or not in CREDO_DATA={DATA}")
    assert block.language == "python"
    names: dict[str, Any] = {"__name__": "__main__"}
    run_python(block, names)
    if block.page == "auto.md":
        chosen = names["posterior"].evidence.rows[0]
        assert chosen.state == "chosen"
        assert chosen.scores["accuracy"] > 0.7


def is_there(name: str) -> bool:
    """Whether a package, a data set, or a file below CREDO_DATA is on this machine."""
    if "/" in name:
        return DATA is not None and (Path(DATA) / name).exists()
    if name not in dataset_names():
        return importlib.util.find_spec(name) is not None
    with contextlib.suppress(DataMissingError):
        load_dataset(name)
        return True
    return False


def run_python(block: Block, names: dict[str, Any]) -> str:
    # Empty lines before it, so that a traceback points into the page.
    code = compile("\n" * (block.line - 1) + block.code, block.place, "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def check_output(printed: str, block: Block) -> None:
    """The same words; numbers may differ by a quarter or 0.02, for training ends elsewhere on other machines."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", block.code).split(), f"{block.place}:\n{printed}"
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(block.code), strict=True):
        close = math.isclose(float(ours), float(theirs), rel_tol=0.25, abs_tol=0.02)
        assert close, f"{block.place}: {theirs} in the page, {ours} now\n{printed}"


def test_blocks_that_are_not_run_are_counted() -> None:
    found = {name_of(path): [b for b in blocks_of(path) if b.mark.startswith("not run:")] for path in PAGES}
    assert {name: len(blocks) for name, blocks in found.items() if blocks} == NOT_RUN
    languages = ("python", "sh", "toml", "text", "")
    unseen = [block.place for path in PAGES for block in blocks_of(path) if block.language not in languages]
    assert unseen == [], "only python, sh and toml blocks are run"


def test_a_wrong_block_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nprint(0.5)\n```\n\n<!-- output -->\n```text\n0.8\n```\n", encoding="utf-8")
    code, output = blocks_of(page)
    assert (code.line, code.mark, output.mark) == (4, "", "output")
    with pytest.raises(AssertionError, match=re.escape("0.8 in the page, 0.5 now")):
        check_output(run_python(code, {}), output)
    with pytest.raises(AssertionError, match="ended with 2"):
        run_command("credo list nothing", "here")
    with pytest.raises(AssertionError, match="too slow"):
        run_command("python -m reproductions weight-sampling --scale paper", "here")


def test_commands_of_reproductions_that_are_not_run_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Papers, tables and rows exist: every command is parsed, and its jobs are counted but not run."""
    counted: list[int] = []

    def count(title: str, table: Table, folder: Path, scale: str, workers: int, selection: dict[str, Any]) -> None:
        counted.append(table.count(scale, **selection))

    monkeypatch.setattr(command, "_run", count)
    monkeypatch.setattr(command, "finish_table", lambda *given, **options: (ResultTable("", [], [], []), {}))
    lines = [
        (line, block)
        for path in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for block in blocks_of(path)
        for line in block.code.splitlines()
        if re.match(r"python -m reproductions (?!list|figure|queue)", line)
    ]
    for line, block in lines:
        run_command(line, block.place, slow=True)
    named = {line.split()[3] for line, _ in lines}
    assert named == set(STUDIES)
    assert min(counted) > 0
    for name, page in ((path.parent.name.replace("_", "-"), path.read_text(encoding="utf-8")) for path in PAPERS):
        for table in STUDIES[name].tables:
            assert f"python -m reproductions {name} --table {table} " in page, f"{name}: table {table} is not described"


def test_tables_of_pages_are_those_of_the_records() -> None:
    """`python docs/make_results.py` would change nothing."""
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "docs" / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    make_results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_results)
    assert set(PAPERS) < set(make_results.PAGES)
    for page in make_results.PAGES:
        text = page.read_text(encoding="utf-8")
        marked = re.findall(r"<!-- table: ([^\s#]+)", text)
        assert marked, page
        assert all((ROOT / "results" / file).exists() for file in marked)
        assert make_results.filled(text) == text, f"{page}: run `python docs/make_results.py`"
        wrong = text.replace(" |\n", " wrong |\n")
        assert make_results.filled(wrong) != wrong


def test_links_lead_somewhere() -> None:
    broken = []
    for path in sorted({*PAGES, *ROOT.glob("*.md")}):
        prose = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            file, _, anchor = target.partition("#")
            if "://" in target:
                continue
            goal = (path.parent / file).resolve() if file else path
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                broken.append(f"{name_of(path)}: {target}")
    assert broken == []


def test_the_index_leads_to_every_page_and_example() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"\]\(([^)#\s]+)", index))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    modules = ("dcgan.py", "espcn.py")  # which examples import
    examples = {f"../examples/{path.name}" for path in (ROOT / "examples").glob("*.*") if path.name not in modules}
    assert sorted((pages | examples) - targets) == []


def anchors(page: Path) -> set[str]:
    """Headings as links name them: small letters, spaces as dashes, punctuation dropped."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_everything_public_is_documented() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    words = set(re.findall(r"[\w-]+", "\n".join(pages.values())))
    choices = {*KL_NAMES, *NOISE_NAMES, *MEAN_INITS, *STRATEGIES, *DECOMPOSITIONS}
    named = {name for kind in catalogue().values() for name in kind}
    assert sorted({*credo.__all__, *credo.evaluate.__all__, *choices, *named} - words) == []
    described = set(re.findall(r"^## `credo (\w+)`", pages["command-line.md"], flags=re.MULTILINE))
    assert set(COMMANDS) == described
    options = {field.name for field in dataclasses.fields(Training)}
    assert options <= set(re.findall(r"^\| `(\w+)` \|", pages["experiments-toml.md"], flags=re.MULTILINE))
