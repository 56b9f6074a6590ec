"""Trained runs to report on, and a real browser to look at pages with, where one is installed."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.experiments.config import make_experiment
from credo.experiments.runs import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """Chromium without a window and without a network, driven through its debugging pipe."""

    def __init__(self, profile: Path) -> None:
        (read_by_it, self._to), (self._from, written_by_it) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
        flags += "--disable-sync --no-first-run --disable-dev-shm-usage --remote-debugging-pipe --allow-file-access"
        # No name resolves, and everything that is not a file would go through a proxy that does not exist.
        offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
        # The debugging pipe is at descriptors 3 and 4, by definition.
        command = f'exec "$@" 3<&{read_by_it} 4>&{written_by_it}'
        arguments = [CHROMIUM or "", *flags.split(), *offline, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(read_by_it, written_by_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        self._buffer, self._last = b"", 0
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(entry["targetId"] for entry in targets if entry["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], 60)[0], "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser went away"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Load a file at that width; `events` then holds what happened since."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        for _ in range(200):
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.02)
        raise AssertionError(f"{page} does not load")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def complaints(self) -> list[Any]:
        """Errors, warnings and messages of the console, and whatever else the browser had to say."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself among them; data addresses are no requests."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [entry["request"]["url"] for entry in sent if not entry["request"]["url"].startswith("data:")]

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        self._process.wait(timeout=20)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


VOID = {"meta", "link", "img", "br"}
QUICK: dict[str, Any] = {"epochs": 3, "batch_size": 64, "validation_draws": 2}


@dataclass
class Element:
    """A tag of a page with what is inside it."""

    tag: str
    attributes: dict[str, str]
    parent: "Element | None"
    children: list["Element"] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(" ".join([*self.pieces, *(child.text for child in self.children)]).split())

    def all(self, tag: str, **attributes: str) -> list["Element"]:
        """Elements inside with that tag; `class_` must be among the classes, others equal."""
        found = []
        for child in self.children:
            classes = child.attributes.get("class", "").split()
            wanted = {key: value for key, value in attributes.items() if key != "class_"}
            same = all(child.attributes.get(key.replace("_", "-")) == value for key, value in wanted.items())
            if child.tag == tag and same and attributes.get("class_", (classes or [""])[0]) in (classes or [""]):
                found.append(child)
            found += child.all(tag, **attributes)
        return found


class _Parser(HTMLParser):
    """Builds the tree, and refuses tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.place = Element("document", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs}, self.place)
        self.place.children.append(element)
        if tag not in VOID:
            self.place = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.place.children.append(Element(tag, {key: value or "" for key, value in attrs}, self.place))

    def handle_endtag(self, tag: str) -> None:
        assert self.place.tag == tag, f"</{tag}> closes <{self.place.tag}>"
        assert self.place.parent is not None
        self.place = self.place.parent

    def handle_data(self, data: str) -> None:
        self.place.pieces.append(data)


def parse(page: str) -> Element:
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert parser.place is parser.root, f"<{parser.place.tag}> is never closed"
    return parser.root


@pytest.fixture
def parsed() -> Callable[[str], Element]:
    """`parsed(html)`: the page as a tree; tags that are not closed in order are a failure."""
    return parse


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(folder: Path, **tables: dict[str, Any]) -> Path:
    """A small network, trained for three epochs unless told otherwise."""
    experiment = make_experiment(
        {"model": {"hidden": [16]}, **tables, "training": {**QUICK, **tables.get("training", {})}}
    )
    for _ in Run(folder).train(experiment, draws=4):
        pass
    return folder


@pytest.fixture(scope="session")
def digits_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A point estimate and a posterior on the bundled digits."""
    place = tmp_path_factory.mktemp("digits")
    plain = trained(place / "map", method={"name": "map", "lr": 5e-3})
    method = {"name": "bbb", "lr": 1e-2, "prior": 0.3, "temperature": 0.1}
    return [plain, trained(place / "bbb", method=method, training={"epochs": 5})]


@pytest.fixture(scope="session")
def gap_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two regressions with one input."""
    place = tmp_path_factory.mktemp("gap")
    data = {"name": "gap", "n": 100}
    methods = {"map": {"name": "map", "lr": 1e-2}, "bbb": {"name": "bbb", "lr": 1e-2, "temperature": 0.1}}
    return [trained(place / name, data=data, method=method) for name, method in methods.items()]


@pytest.fixture(scope="session")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight columns and classes whose names are HTML, in a folder whose name is, too."""
    place = tmp_path_factory.mktemp("table")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(120, 8, generator=generator)
    kinds = ["<script>alert(1)</script>" if row[0] > 0 else "a & 'b' \"c\"" for row in values]
    rows = [",".join(f"{value:.3f}" for value in row.tolist()) for row in values]
    lines = [f"{row};{kind}".replace(",", ";") for row, kind in zip(rows, kinds, strict=True)]
    (place / "table.csv").write_text("\n".join(["a;b;c;d;e;f;g;h;kind", *lines]) + "\n")
    options = {"path": str(place / "table.csv"), "target": "kind", "task": "classification", "test_fraction": 0.4}
    return trained(place / "<b>run & more", data={"name": "csv", **options}, method={"name": "map", "lr": 1e-2})
