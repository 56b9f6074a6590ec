"""Gather what the site is built of in build/docs: pages, notebooks, reproductions, examples and the API reference.

`make docs` runs this, then `zensical build --strict`, which reads zensical.toml, then this with `local`, which makes
the site load nothing from elsewhere, and docs/check_site.py. Pages keep their text; links that
leave docs/ are pointed at the copies. It reads source files only, so torch need not be installed.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import make_notebooks

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
FETCHED = "https://unpkg.com/iframe-worker/shim"  # what the offline search of the theme loads
# File of the reference, its title, the package whose `__all__` it describes. What is left of `credo` is the first page.
ROOMS = (
    ("methods", "Methods", "credo.methods"),
    ("optim", "Optimisers", "credo.optim"),
    ("priors", "Priors", "credo.priors"),
    ("likelihoods", "Likelihoods", "credo.likelihoods"),
    ("training", "Training and files", "credo.training"),
    ("predict", "Prediction", "credo.predict"),
    ("evaluate", "Evaluation", "credo.evaluate"),
    ("calibration", "Calibration", "credo.calibration"),
    ("detection", "Out-of-distribution detection", "credo.detection"),
    ("doctor", "The doctor", "credo.doctor"),
    ("attacks", "Attacks", "credo.attacks"),
    ("compress", "Pruning", "credo.compress"),
    ("continual", "Continual learning", "credo.continual"),
    ("data", "Data", "credo.data"),
    ("models", "Models", "credo.models"),
    ("exporting", "Export", "credo.exporting"),
    ("report", "Report", "credo.report"),
    ("sklearn", "scikit-learn", "credo.sklearn"),
    ("integrations", "Integrations", "credo.integrations"),
)
EVERYTHING = "credo.api"
MADE_BY = {  # classes that a function makes when another package is installed: its docstring is read instead
    "credo.integrations.BayesCallback": "credo.integrations.lightning.bayes_callback",
    "credo.integrations.BayesTrainer": "credo.integrations.hugging_face.bayes_trainer",
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def public_names(module: str) -> list[str]:
    """Return the names in a module's `__all__`, by reading its source.

    Args:
        module: Dotted name below `credo`.
    """
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[union-attr]
    raise ValueError(f"{file} has no literal __all__")


def reference() -> dict[str, str]:
    """Return the pages of the API reference by file name."""
    listed = {module: public_names(module) for _, _, module in ROOMS}
    taken = {name for names in listed.values() for name in names} | {module.split(".")[-1] for module in listed}
    rest = [name for name in public_names(EVERYTHING) if name not in taken and not name.startswith("__")]
    pages = {"index.md": room_page("Posteriors, errors and warnings", EVERYTHING, rest)}
    for file, title, module in ROOMS:
        pages[f"{file}.md"] = room_page(title, module, listed[module])
    return pages


def room_page(title: str, module: str, names: list[str]) -> str:
    """Return one page of the API reference.

    Args:
        title: Its heading.
        module: Where the names are imported from.
        names: What it describes, in any order: classes and functions first, constants last.
    """
    ordered = sorted(names, key=lambda name: (name.isupper() and len(name) > 5, name.lower()))
    shown = "credo" if module == EVERYTHING else module
    lines = [f"# {title}", f"What `{shown}` offers here, from the docstrings of the code."]
    for name in ordered:
        maker = MADE_BY.get(f"{module}.{name}")
        lines += [f"`{module}.{name}` is made by:"] if maker else []
        lines += [f"::: {maker or f'{module}.{name}'}"]
    return "\n\n".join(lines) + "\n"


def copies() -> dict[Path, str]:
    """Return {file of the repository: its path in the site} for everything that pages may link to."""
    found = {path: path.name for path in (ROOT / "docs").glob("*.md")}
    found |= {ROOT / "docs" / name: name for name in ("contrast.css", "keyboard.js")}
    found |= {path: f"images/{path.name}" for path in (ROOT / "docs/images").iterdir() if path.is_file()}
    for path in (ROOT / "reproductions").glob("**/README.md"):
        found[path] = f"reproductions/{'index' if path.parent.name == 'reproductions' else path.parent.name}.md"
    for path in (ROOT / "examples").glob("*.*"):
        found[path] = f"examples/{path.name.replace('.', '-')}.md"
    found |= {ROOT / name: f"project/{name.lower()}" for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")}
    return found


def rewritten(text: str, source: Path, places: dict[Path, str]) -> str:
    """Return a page's text with its links pointing into the site; those to other files become code.

    Args:
        text: The page.
        source: Where it is in the repository.
        places: What `copies` returns.
    """
    here = Path(places[source]).parent

    def point(match: re.Match[str]) -> str:
        label, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if "://" in target or not target:
            return match.group(0)
        goal = (source.parent / target).resolve()
        if goal == ROOT / "examples":
            return f"[{label}]({os.path.relpath('examples/index.md', here)})"
        if goal in places:
            return f"[{label}]({os.path.relpath(places[goal], here)}{anchor})"
        path = goal.relative_to(ROOT)
        return label if f"{path}" in label else f"{label} (`{path}` in the repository)"

    parts = re.split(r"(^ *```.*?^ *```$)", deepened(text), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.lstrip().startswith("```") else LINK.sub(point, spaced(part)) for part in parts)


def deepened(text: str) -> str:
    """Return Markdown whose numbered items have what belongs to them four spaces deep, as Python-Markdown wants it.

    GitHub wants three, under the first letter of the item. An item after one with paragraphs gets an empty line above.
    """
    lines: list[str] = []
    inside = loose = in_code = False
    for line in text.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        starts = not in_code and re.match(r"\d+\. ", line) is not None
        if starts and inside and loose and lines[-1]:
            lines.append("")
        inside = starts or (inside and (not line or line.startswith("   ")))
        loose = inside and (loose or not line)
        lines.append(f" {line}" if inside and line.startswith("   ") else line)
    return "\n".join(lines)


def spaced(text: str) -> str:
    """Return Markdown with an empty line before each list, which GitHub does not need and Python-Markdown does."""
    text = re.sub(r"^(?!\s*(?:[-*]|\d+\.) )(\S.*)\n(?=(?:[-*]|\d+\.) )", r"\1\n\n", text, flags=re.MULTILINE)
    return re.sub(r"^  (- )", r"    \1", text, flags=re.MULTILINE)


def with_notebook(text: str, place: str) -> str:
    """Return a page with a link to its notebook below the title, if it is a tutorial.

    Args:
        text: The page.
        place: Its path in the site.
    """
    name = place.removesuffix(".md")
    if name not in make_notebooks.TUTORIALS:
        return text
    title, _, rest = text.partition("\n")
    return f"{title}\n\n[Open this page as a notebook](notebooks/{name}.ipynb){{ download }}\n{rest}"


def example_page(path: Path) -> str:
    """Return a page that shows an example's source."""
    language = "toml" if path.suffix == ".toml" else "python"
    return f"# {path.name}\n\n```{language}\n{path.read_text(encoding='utf-8').strip()}\n```\n"


def gather(target: Path = TARGET) -> None:
    """Write everything into a new folder.

    Args:
        target: The folder; what was in it is deleted.
    """
    shutil.rmtree(target, ignore_errors=True)
    places = copies()
    for source, place in places.items():
        goal = target / place
        goal.parent.mkdir(parents=True, exist_ok=True)
        if source.parent == ROOT / "examples":
            goal.write_text(example_page(source), encoding="utf-8")
        elif source.suffix == ".md":
            text = rewritten(source.read_text(encoding="utf-8"), source, places)
            goal.write_text(with_notebook(text, place), encoding="utf-8")
        else:
            shutil.copyfile(source, goal)
    examples = sorted((Path(place).name, path) for path, place in places.items() if path.parent == ROOT / "examples")
    lines = [f"- [{path.name}]({place})" for place, path in examples]
    (target / "examples/index.md").write_text("# Examples\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    make_notebooks.write(target / "notebooks")
    (target / "api").mkdir()
    for name, text in reference().items():
        (target / "api" / name).write_text(text, encoding="utf-8")


def make_local(site: Path = SITE) -> None:
    """Let a built site load nothing from elsewhere: of what the theme fetches, put a file of our own in its place.

    Args:
        site: The folder of the built pages, which are changed.
    """
    shutil.copyfile(ROOT / "docs" / "offline_worker.js", site / "assets" / "offline_worker.js")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        here = os.path.relpath(site / "assets" / "offline_worker.js", page.parent)
        page.write_text(text.replace(FETCHED, here), encoding="utf-8")


if __name__ == "__main__":
    make_local() if sys.argv[1:] == ["local"] else gather()
