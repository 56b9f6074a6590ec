"""The documentation as a reader uses it: every block is run, every example, every link followed.

In a page, an HTML comment on the line before a block says how to treat it:

    <!-- continues -->        the block goes on with the names of the Python block before it
    <!-- output -->           the block is what the Python block before it printed (numbers: about)
    <!-- not run: reason -->  the block is only shown; `NOT_RUN` counts these

Python blocks run in a fresh namespace. Of a shell block, the lines that begin with `credo ` run; `# exit code 2` at the
end of a line says that it is meant to fail. A TOML block must be an experiment that could run. All blocks of a page run
in its order, in one empty folder.
"""

import contextlib
import dataclasses
import importlib.util
import io
import math
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import credo
from credo.cli.app import app
from credo.cli.listing import catalogue
from credo.data import Split
from credo.experiments.config import Training, make_experiment, prepare
from credo.methods.bbb import KL_NAMES, NOISE_NAMES
from credo.methods.initial import MEAN_INITS
from credo.predict.strategies import STRATEGIES
from credo.predict.uncertainty import DECOMPOSITIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Examples that go with another library, if it is there.
NEEDED = {"transformers_ivon.py": "transformers"}
# Examples that train for minutes and can be told to only show that they run; applications may be longer.
QUICK = {"gan.py", "super_resolution.py"}
# Blocks that are shown but not run. A new one must be entered here, with a reason in the page.
NOT_RUN = {
    "adversarial-sampling.md": 1,
    "bayesian-cnn.md": 1,
    "command-line.md": 3,
    "data-and-models.md": 1,
    "migration.md": 5,
    "node-bnn.md": 1,
    "optimizers.md": 4,
    "results.md": 4,
    "sklearn.md": 3,
}
# Minutes to days, or the network: never in a test.
SLOW = re.compile(r"^credo (demo|reproduce (?!list))|--download|data\.name=(mnist|fashion-mnist|kmnist|notmnist|cifar)")
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
            found.append(Block(path.name, opened + 1, language, code, mark))
            opened, mark = None, ""
        elif opened is None and text:
            comment = re.fullmatch(r"<!--\s*(.*?)\s*-->", text)
            mark = comment.group(1) if comment else ""
    assert opened is None, f"{path.name}: the block of line {opened} is never closed"
    return found


@pytest.fixture(autouse=True)
def _place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, no data sets but the bundled ones, and nothing left behind in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "no-data"))
    # The pages print numbers; compiled noise would make them depend on whether there is a compiler.
    monkeypatch.setenv("CREDO_KERNELS", "0")
    methods, threads, state = dict(credo.METHODS), torch.get_num_threads(), torch.get_rng_state()
    yield
    credo.METHODS.clear()
    credo.METHODS.update(methods)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_of_a_page_runs(path: Path) -> None:
    names: dict[str, Any] = {}
    printed = ""
    for block in blocks_of(path):
        if block.mark.startswith("not run:"):
            continue
        if block.language == "python":
            names = names if block.mark == "continues" else {"__name__": "__main__"}
            printed = run_python(block, names)
        elif block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.startswith("credo "):
                    run_command(line, block.place)
        elif block.language == "toml":
            prepare(make_experiment(tomllib.loads(block.code)))
        elif block.mark == "output":
            check_output(printed, block)


def run_python(block: Block, names: dict[str, Any]) -> str:
    # Empty lines before it, so that a traceback points into the page.
    code = compile("\n" * (block.line - 1) + block.code, block.place, "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def run_command(line: str, place: str) -> str:
    assert not SLOW.search(line), f"{place}: {line!r} is too slow for a test; mark it <!-- not run: reason -->"
    stated = re.search(r"# exit code (\d+)", line)
    arguments = shlex.split(line, comments=True)[1:]
    result = CliRunner().invoke(app, arguments)
    wanted = int(stated.group(1)) if stated else 0
    assert result.exit_code == wanted, f"{place}: {line!r} ended with {result.exit_code}\n{result.output}"
    return result.stdout


def check_output(printed: str, block: Block) -> None:
    """The same words; numbers may differ by a quarter or 0.02, for training ends elsewhere on other machines."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", block.code).split(), f"{block.place}:\n{printed}"
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(block.code), strict=True):
        close = math.isclose(float(ours), float(theirs), rel_tol=0.25, abs_tol=0.02)
        assert close, f"{block.place}: {theirs} in the page, {ours} now\n{printed}"


def test_blocks_that_are_not_run_are_counted() -> None:
    found = {path.name: [b for b in blocks_of(path) if b.mark.startswith("not run:")] for path in PAGES}
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
        run_command("credo reproduce weight-sampling --scale paper", "here")


def test_links_lead_somewhere() -> None:
    broken = []
    for path in [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]:
        prose = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            file, _, anchor = target.partition("#")
            if "://" in target:
                continue
            goal = (path.parent / file).resolve() if file else path
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_the_index_leads_to_every_page_and_example() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"\]\(([^)#\s]+)", index))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    examples = {f"../examples/{path.name}" for path in (ROOT / "examples").glob("*.*")}
    assert sorted((pages | examples) - targets) == []


def anchors(page: Path) -> set[str]:
    """Headings as links name them: small letters, spaces as dashes, punctuation dropped."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_everything_public_is_documented() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in PAGES if path.name != "README.md"}
    words = set(re.findall(r"[\w-]+", "\n".join(pages.values())))
    choices = {*KL_NAMES, *NOISE_NAMES, *MEAN_INITS, *STRATEGIES, *DECOMPOSITIONS}
    named = {name for kind in catalogue().values() for name in kind}
    assert sorted({*credo.__all__, *credo.evaluate.__all__, *choices, *named} - words) == []
    commands = {command.name for command in app.registered_commands}
    described = set(re.findall(r"^## `credo (\w+)`", pages["command-line.md"], flags=re.MULTILINE))
    assert commands == described
    options = {field.name for field in dataclasses.fields(Training)}
    assert options <= set(re.findall(r"^\| `(\w+)` \|", pages["experiments-toml.md"], flags=re.MULTILINE))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = path.name in QUICK
    assert len(path.read_text(encoding="utf-8").splitlines()) < (120 if quick else 60)
    monkeypatch.setattr(sys, "argv", [str(path), *(["--quick"] if quick else [])])
    needed = NEEDED.get(path.name)
    if needed and importlib.util.find_spec(needed) is None:
        with pytest.raises(SystemExit, match=f"pip install {needed}"):
            runpy.run_path(str(path), run_name="__main__")
        pytest.skip(f"{needed} is not installed")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        names = runpy.run_path(str(path), run_name="__main__")
    globals()[f"check_{path.stem}"](names, out.getvalue())


def check_own_loop(names: dict[str, Any], out: str) -> None:
    assert names["accuracy"] > 0.93
    assert names["doubt"][~names["right"]].mean() > 2 * names["doubt"][names["right"]].mean()


def check_fit_and_predict(names: dict[str, Any], out: str) -> None:
    assert names["metrics"]["accuracy"] > 0.94
    assert "predicts the same: True" in out


def check_optimizer_loop(names: dict[str, Any], out: str) -> None:
    for metrics in names["results"].values():
        assert metrics["accuracy"] > 0.95
        assert metrics["nll"] < 0.25
        assert metrics["ood"]["photographs"]["entropy"]["auroc"] > 0.85


def check_transformers_ivon(names: dict[str, Any], out: str) -> None:
    assert names["metrics"]["accuracy"] > 0.85  # of the labels, a tenth is wrong
    assert names["metrics"]["ece"] < 0.05


def check_regression(names: dict[str, Any], out: str) -> None:
    assert names["inside"] > 1.2 * names["outside"]
    # 200 test targets, more than half of them where there was data.
    assert 0.8 < names["metrics"]["interval_coverage"]["0.9"] <= 1
    assert Path("gap.png").stat().st_size > 5000


def check_pretrained(names: dict[str, Any], out: str) -> None:
    plain, bayesian = names["results"]["deterministic"], names["results"]["Bayesian"]
    assert bayesian["accuracy"] > plain["accuracy"] - 0.02
    assert bayesian["nll"] < plain["nll"] + 0.01


def check_add_a_method(names: dict[str, Any], out: str) -> None:
    assert float(out.split()[-1]) > 0.9
    credo.save(names["posterior"], "swag.safetensors")
    loaded = credo.load(
        "swag.safetensors", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    x = names["digits"].test.x[:20]
    assert torch.equal(credo.predict(loaded, x).probs, credo.predict(names["posterior"], x).probs)
    check_swag_moments(names["DiagonalSWAG"])


def check_super_resolution(names: dict[str, Any], out: str) -> None:
    ((bicubic, bayesian),) = names["results"].values()
    # After 264 steps of the 3,960. One that does not learn stays below bicubic by the noise of its first weights.
    assert bayesian > bicubic + 0.1
    original, mean = names["original"], names["prediction"].mean
    assert bayesian == pytest.approx(10 * math.log10(1 / float(((mean.clamp(0, 1) - original) ** 2).mean())), rel=1e-5)
    assert float(names["prediction"].epistemic.min()) > 0
    assert "better on 1 of 1" in out
    assert Path("super_resolution.png").stat().st_size > 5000


def super_resolution(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    script = str(ROOT / "examples" / "super_resolution.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--quick"])
    return runpy.run_path(script, run_name="__main__")


def save_noise(path: Path, width: int, height: int) -> None:
    """An image that no network can enlarge; the suffix says in which format."""
    path.parent.mkdir(exist_ok=True)
    pixels = torch.randint(256, (height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)


def test_super_resolution_takes_what_it_can_of_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.JPG", "c.png", "d.gif", "e.tif", "f.bmp"):
        save_noise(Path("images", name), 51, 53)
    save_noise(Path("images/a.png"), 700, 60)
    save_noise(Path("images/icon.png"), 300, 50)
    for name in (".DS_Store", "._c.png", "notes.txt"):
        Path("images", name).write_bytes(b"not an image")
    names = super_resolution(monkeypatch, "images")
    out = capsys.readouterr().out
    assert re.findall(r"^(\S+) is left out", out, flags=re.MULTILINE) == ["._c.png", "icon.png"]
    assert "300x50 pixels, less than 51x51" in out
    assert list(names["results"]) == ["a.png", "f.bmp"], "the first and the sixth of six"
    assert len(names["known"]) == 4
    with Image.open("images/a.png") as image:
        middle = torch.tensor(list(image.crop((30, 0, 669, 60)).tobytes())).reshape(1, 1, 60, 639) / 255
    torch.testing.assert_close(names["unseen"]["a.png"], middle)
    means = torch.tensor(list(names["results"].values())).mean(0)
    shown = re.search(r"mean PSNR bicubic (\S+) dB, Bayesian ESPCN (\S+) dB", out)
    assert shown is not None
    assert [float(number) for number in shown.groups()] == pytest.approx(means.tolist(), abs=0.006)


def test_super_resolution_is_tried_on_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    save_noise(Path("one/known.png"), 51, 51)
    save_noise(Path("other/unseen.png"), 54, 51)
    names = super_resolution(monkeypatch, "one", "--test", "other")
    assert list(names["results"]) == ["unseen.png"]
    assert [list(image.shape) for image in names["known"]] == [[1, 1, 51, 51]]


def test_super_resolution_refuses_a_folder_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_noise(Path("images/one.png"), 60, 60)
    save_noise(Path("images/small.png"), 50, 60)
    Path("images/.DS_Store").write_bytes(b"not an image")
    Path("empty").mkdir()
    for arguments, words in {
        ("images",): "images has 1 images that can be used, at least 2 are needed: add some",
        ("empty",): "empty has 0 images that can be used, at least 2",
        ("--test", "empty"): "empty has 0 images that can be used, at least 1",
        ("images/one.png",): "one.png is not a folder: give one",
    }.items():
        with pytest.raises(SystemExit) as ended:
            super_resolution(monkeypatch, *arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def check_gan(names: dict[str, Any], out: str) -> None:
    assert set(names["results"]) == {"plain", "Bayesian"}
    # The score is the exponential of a KL, which rounding may take below 0.
    assert all(1 - 1e-5 <= score <= 10 for score, _ in names["results"].values())
    truth = names["held_out"].x
    assert abs(names["scores"](truth, truth, names["judge"].model)[1]) < 1e-3, "a set is at no distance from itself"
    assert names["results"]["plain"] != names["results"]["Bayesian"]
    assert names["discriminators"]["Bayesian"].steps == names["discriminators"]["plain"].steps == 4
    check_who_is_called_real(names["train"])


class Brightness:
    """In a discriminator's place: bright images are real, whatever it is taught; keeps what it is asked."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.verdicts: list[float] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * x.mean((1, 2, 3)) - 5

    def step(self, nll: Any) -> None:
        self.losses.append(float(nll(self)))

    def draw(self) -> str:
        return "a draw"

    @contextlib.contextmanager
    def sampled(self, draw: str) -> Iterator[Any]:
        assert draw == "a draw"
        yield self.judge

    def judge(self, x: torch.Tensor) -> torch.Tensor:
        logits = self(x)
        self.verdicts.append(float(logits.detach().mean()))
        return logits


def check_who_is_called_real(train: Any) -> None:
    """White images are real and the first made ones grey: one who mixes up labels trains towards black."""
    discriminator = Brightness()
    train(discriminator, Split(torch.ones(64, 1, 32, 32), torch.zeros(64, dtype=torch.long)), 20)
    assert len(discriminator.losses) == len(discriminator.verdicts) == 20, "more steps than an epoch has"
    assert discriminator.losses[0] < 0.1
    assert discriminator.verdicts[0] == pytest.approx(-5, abs=0.2)
    assert discriminator.verdicts[-1] > discriminator.verdicts[0] + 0.3


def check_swag_moments(swag: Any) -> None:
    """Against the slow obvious way: keep all weights, then take mean and standard deviation."""
    torch.manual_seed(0)
    posterior = swag(nn.Linear(3, 2), data_size=10, lr=0.3, start=4)
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    visited = []
    for _ in range(12):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
        visited.append(posterior.model.weight.detach().clone())
        with torch.no_grad():
            posterior(x)
        assert torch.equal(posterior.model.weight, visited[-1])
    kept = torch.stack(visited[4:])
    torch.testing.assert_close(posterior.mean()["weight"], kept.mean(0))
    torch.testing.assert_close(posterior.std()["weight"], kept.std(0, correction=0))


def test_example_experiment() -> None:
    run_command(f"credo train {ROOT / 'examples' / 'experiment.toml'} --run run", "examples/experiment.toml")
    run_command("credo evaluate run --draws 8", "examples/experiment.toml")
    assert Path("run/evaluation.json").exists()
