"""Write the tutorials as notebooks: `python docs/make_notebooks.py FOLDER`; `make docs` puts them into the site.

A notebook is its page: prose becomes text cells, blocks that the tests run become code cells, with the output that the
page shows. So it is never edited, and has no code that is not tested. It reads source files only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The pages that docs/tutorials.md lists.
TUTORIALS = (
    "trained-network",
    "optimizers",
    "auto",
    "sklearn",
    "priors-and-likelihoods",
    "answers-you-can-rely-on",
    "out-of-distribution",
    "lora",
    "continual",
    "attacks",
    "export",
    "serving",
)
BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n+)?^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+://)[^)]*\)")


def notebook(page: Path) -> dict[str, Any]:
    """Return a page as a notebook of format 4.5.

    Args:
        page: The Markdown file.
    """
    text = page.read_text(encoding="utf-8")
    cells: list[dict[str, Any]] = []
    position = 0
    for match in BLOCK.finditer(text):
        add_text(cells, text[position : match.start()])
        mark, language, code = match.group(1) or "", match.group(2), match.group(3)
        if mark == "output":
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines_of(code)}]
        elif mark.startswith("not run") or language not in ("python", "sh"):
            add_text(cells, f"```{language}\n{code}```")
        else:
            add_code(cells, code if language == "python" else shell(code))
        position = match.end()
    add_text(cells, text[position:])
    for index, cell in enumerate(cells):
        cell["id"] = f"cell-{index}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def shell(code: str) -> str:
    """Return commands as a notebook runs them, each after an exclamation mark."""
    joined = code.replace("\\\n", " ").splitlines()
    return "\n".join(f"!{re.sub(r'  +', ' ', line)}" for line in joined if line.strip() and not line.startswith("#"))


def add_text(cells: list[dict[str, Any]], text: str) -> None:
    """Append prose, if there is any; links to other pages and pictures, which a notebook has not, become plain text."""
    text = re.sub(r"<!-- .*? -->\n?", "", LINK.sub(lambda match: "" if match.group(1) else match.group(2), text))
    if text.strip():
        cells.append({"cell_type": "markdown", "metadata": {}, "source": lines_of(text.strip())})


def add_code(cells: list[dict[str, Any]], code: str) -> None:
    """Append a cell to run."""
    source = lines_of(code.rstrip("\n"))
    cells.append({"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source})


def lines_of(text: str) -> list[str]:
    """Return lines as a notebook stores them."""
    return text.splitlines(keepends=True)


def write(folder: Path) -> list[Path]:
    """Write all notebooks and return their files.

    Args:
        folder: Where they go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in TUTORIALS:
        path = folder / f"{name}.ipynb"
        content = notebook(ROOT / "docs" / f"{name}.md")
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        made.append(path)
    return made


if __name__ == "__main__":
    for file in write(Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks")):
        print(file)
