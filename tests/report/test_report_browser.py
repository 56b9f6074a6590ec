"""The page in a real browser: phone and desktop, light and dark, without a network."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from credo.report import gather, write_report

OOD = "photo-patches"
WIDTHS = (390, 1280)
# The widest thing that is not inside a box with a scroll bar of its own.
OVERFLOW = """
[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, details:not([open]) > :not(summary)'))
  .filter(e => !e.closest('svg') || e.tagName === 'svg' && !e.closest('svg svg'))
  .map(e => [e.tagName + '.' + (e.getAttribute('class') || ''), e.getBoundingClientRect().right])
  .filter(([_, right]) => right > document.documentElement.clientWidth + 0.5)
"""
# Labels of plots outside of the page, or so close that they touch the next one on the same axis.
LABELS = """
[...document.querySelectorAll('.plot text')].filter(t => t.checkVisibility())
  .map(t => [t.textContent, t.getBoundingClientRect(), parseFloat(getComputedStyle(t).fontSize)])
  .filter(([_, box, size]) => box.right > innerWidth || box.left < 0 || size < 10 || box.height < 10)
  .map(([text, box, size]) => [text, box.left, box.right, size])
"""
TOUCHING = """
[...document.querySelectorAll('.plot > svg')].filter(s => s.checkVisibility()).flatMap(s => {
  const boxes = [...s.querySelectorAll('.tick.x')].map(t => t.getBoundingClientRect());
  return boxes.slice(1).filter((b, i) => b.left < boxes[i].right + 1).map(b => [b.left, b.top]);
})
"""
# Upper ends of the first plots of panels, for each figure: at 1280 pixels two panels are in one row.
LEVELS = """
[...document.querySelectorAll('figure')].map(f =>
  [...f.querySelectorAll('.panel')].map(p => p.querySelector('.plot > svg').getBoundingClientRect().top))
"""


@pytest.fixture(scope="module")
def pages(
    digits_runs: list[Path], gap_runs: list[Path], table_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    contents = {
        "digits": gather(digits_runs, ood=[OOD], draws=2, doctor=False),
        "gap": gather(gap_runs, draws=2, doctor=False),
        "table": gather([table_run], draws=2, doctor=False, title="A_title_that_is_one_very_long_word_" * 4),
        "doctor": gather([Path(shutil.copytree(run, place / run.name)) for run in digits_runs], draws=2),
        "samples": gather([_sampled(run, place / f"sampled {run.name}") for run in digits_runs], draws=2, doctor=False),
    }
    return {name: write_report(content, place / f"{name}.html") for name, content in contents.items()}


def _sampled(run: Path, place: Path) -> Path:
    """The run with twenty sampled networks, as `credo evaluate --samples` leaves it."""
    accuracies = [0.5 + 0.4 * i / 19 for i in range(20)]
    samples = {"draws": 20, "lowest": 0.5, "highest": 0.9, "mean": 0.7, "ensembled": 0.85, "accuracies": accuracies}
    shutil.copytree(run, place)
    (place / "evaluation.json").write_text(json.dumps({"samples": samples}))
    return place


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["doctor", "samples"])
def test_page_with_everything_unfolded(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width=width, dark=False)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OVERFLOW) == []
    assert browser.run(LABELS) == []
    assert browser.run(TOUCHING) == []
    seen = "[...document.querySelectorAll('{}')].filter(e => e.checkVisibility() && e.clientWidth > 180).length"
    if name == "doctor":
        assert browser.run(seen.format("#doctor article")) == 2
        assert browser.run(seen.format("#doctor .findings li")) >= 1
        assert browser.run(seen.format("#doctor details table")) >= 3  # layers of one run, measurements of both
    else:
        assert browser.run(seen.format("#draws .plot > svg")) == 3  # both runs' ranges, and a histogram of each
    assert browser.complaints() == []


def test_plots_beside_each_other_are_level(browser: Any, pages: dict[str, Path]) -> None:
    """Also where the heading of one wraps."""
    browser.open(pages["gap"], width=1280, dark=False)
    browser.run(
        "document.querySelectorAll('.panel .heading').forEach((h, i) => { if (i % 2) h.append(' long'.repeat(60)) })"
    )
    rows = browser.run(LEVELS)
    assert any(len(tops) > 1 for tops in rows)
    assert all(max(tops) - min(tops) < 1 for tops in rows)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "figures", "plots"), [("digits", 8, 15), ("gap", 7, 10), ("table", 6, 7)])
def test_page(
    browser: Any, pages: dict[str, Path], name: str, figures: int, plots: int, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OVERFLOW) == []
    assert browser.run(LABELS) == []
    assert browser.run(TOUCHING) == []
    assert browser.run("document.querySelectorAll('figure').length") == figures
    assert browser.run("[...document.querySelectorAll('.plot > svg')].filter(s => s.clientWidth > 180).length") == plots
    pictures = "[...document.images].filter(i => i.checkVisibility())"
    assert browser.run(f"{pictures}.every(i => i.complete && i.naturalWidth > 1)")
    assert browser.run(f"{pictures}.length") == (32 if name == "digits" else 0)
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].resolve().as_uri()]


def test_figures_follow_the_scheme(browser: Any, pages: dict[str, Path]) -> None:
    found = {}
    for dark in (False, True):
        browser.open(pages["digits"], width=1280, dark=dark)
        colour = "getComputedStyle(document.querySelector('{}')).{}"
        places = {"body": "backgroundColor", "h1": "color", ".plot .line": "stroke", ".plot .tick": "fill"}
        found[dark] = {place: browser.run(colour.format(place, kind)) for place, kind in places.items()}
    assert all(found[False][place] != found[True][place] for place in found[False])
    for dark, colours in found.items():
        page, text = (sum(map(int, colours[place][4:-1].split(","))) for place in ("body", "h1"))
        assert (text > page) is dark


def test_text_can_be_read(browser: Any, pages: dict[str, Path]) -> None:
    """Contrast of at least 4.5 to the card behind it, in both schemes (WCAG 2, level AA)."""
    places = ("figcaption", ".plot .tick", ".plot .axis", "caption", "small", ".run", ".better", ".worse", ".truth")
    script = """
    (() => {
      const light = c => { const v = c.match(/\\d+/g).slice(0, 3).map(x => x / 255)
          .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
      const e = document.querySelector('PLACE'); if (!e) return null;
      const style = getComputedStyle(e), own = light(e.closest('svg') ? style.fill : style.color);
      const back = light(getComputedStyle(e.closest('.card') || document.body).backgroundColor);
      return (Math.max(own, back) + 0.05) / (Math.min(own, back) + 0.05);
    })()
    """
    measured = 0
    for dark in (False, True):
        browser.open(pages["digits"], width=1280, dark=dark)
        for place in places:
            contrast = browser.run(script.replace("PLACE", place))
            assert contrast is None or contrast >= 4.5, f"{place}, dark {dark}: {contrast:.2f}"
            measured += contrast is not None
    assert measured >= 12


def test_the_browser_would_notice(browser: Any, tmp_path: Path) -> None:
    """Something too wide, a failing script and a request are all seen: the tests above can fail."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><meta name=viewport content='width=device-width'><body>"
        "<div style='width:600px'>wide</div><img src='http://example.invalid/x.png'><script>nonsense()</script></body>"
    )
    browser.open(page, width=390, dark=False)
    assert browser.run("document.documentElement.scrollWidth") > 390
    assert browser.run(OVERFLOW)
    assert any("example.invalid" in address for address in browser.requests())
    assert any("nonsense" in str(entry) for entry in browser.complaints())
