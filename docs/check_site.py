"""Check the built site: every link leads to a page, a file or a heading of it, and nothing is fetched from elsewhere.

`make docs` runs it. It reads HTML only, with the standard library.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parent.parent / "build" / "site"


class Page(HTMLParser):
    """The links of a page, its anchors, and what a browser would load for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to, and the name that it gives to a place."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and "href" in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given["href"])


def problems(site: Path) -> list[str]:
    """Return what is wrong, one line each.

    Args:
        site: The folder with the built pages.
    """
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in {*page.links, *page.loaded}:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loaded and parts.scheme != "data":
                    found.append(f"{name}: loads {target} from elsewhere")
                continue
            goal = path if not parts.path else site / parts.path.lstrip("/")
            if parts.path and not parts.path.startswith("/"):
                goal = (path.parent / unquote(parts.path)).resolve()
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists():
                found.append(f"{name}: {target} leads nowhere")
            elif parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
                found.append(f"{name}: {target}: there is no such heading")
    return sorted(found)


if __name__ == "__main__":
    wrong = problems(SITE)
    print("\n".join(wrong) or "every link of the site leads somewhere")
    sys.exit(bool(wrong))
