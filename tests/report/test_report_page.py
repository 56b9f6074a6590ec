"""The page: what is in it, that it needs nothing else, that names cannot break it, and what raises."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.core.held_out.evidence import AutoEvidence, Tried
from credo.report import Content, gather, render, write_report
from credo.report.examples import confidently_wrong, least_certain, most_certain

OOD = "photo-patches"


@pytest.fixture(scope="module")
def digits(digits_runs: list[Path]) -> Content:
    return gather(digits_runs, ood=[OOD], draws=4, title="A <title> & more", doctor=False)


def titles(tree: Any) -> list[str]:
    return [heading.text for figure in tree.all("figure") for heading in figure.all("h3")]


def test_contents_of_a_classification(digits: Content, parsed: Callable) -> None:
    tree = parsed(render(digits))
    assert titles(tree) == [
        "Reliability",
        "Confidence",
        "Predictive entropy",
        "Accuracy of retained inputs",
        "Detection of photo-patches",
        "Negative log-likelihood",
        "Penalty",
        "Validation accuracy",
    ]
    assert [heading.text for heading in tree.all("h2")] == [
        "Runs",
        "Calibration",
        "Confidence and uncertainty",
        "Selective prediction",
        "Out-of-distribution detection",
        "Training",
        "Examples",
        "How to read",
    ]
    # Reliability with counts, two histograms, ROC, likelihoods: of two runs each. One penalty. Two figures of all runs.
    assert len(tree.all("div", class_="plot")) == 2 * 2 + 2 * 2 + 2 + 2 + 1 + 2
    for figure in tree.all("figure"):
        assert "Good:" in figure.all("figcaption")[0].text
    head = tree.all("header")[0].text
    for fact in ("359", "1,000 photo-patches", "Draws 4", "credo", "torch", digits.made.strftime("%Y-%m-%d")):
        assert fact in head
    terms = [term.text for term in tree.all("dl", class_="glossary")[0].all("dt")]
    assert terms == ["Accuracy", "NLL", "ECE", "Brier", "OOD AUROC", "95 % interval", "p"]


def test_contents_of_a_regression(gap_runs: list[Path], parsed: Callable) -> None:
    tree = parsed(render(gather(gap_runs, draws=4, doctor=False)))
    assert titles(tree) == [
        "Coverage",
        "Prediction over the input",
        "Predicted standard deviation",
        "RMSE of retained inputs",
        "Negative log-likelihood",
        "Penalty",
        "Validation RMSE",
    ]
    columns = [cell.attributes["data-key"] for cell in tree.all("tr", data_run="bbb")[0].all("td")]
    assert columns == ["rmse", "nll", "crps", "parameters", "seconds"]
    text = tree.all("section", id="examples")[0].text
    assert "Every input has the same predicted standard deviation" in text  # a point estimate with constant noise
    assert "Largest errors" in text


def test_one_run_has_nothing_to_compare(digits_runs: list[Path], parsed: Callable) -> None:
    tree = parsed(render(gather(digits_runs[1:], draws=2, doctor=False)))
    assert len(tree.all("tr", data_run="bbb")) == 1
    assert not tree.all("table", class_="differences")
    assert not tree.all("span", class_="star")
    assert "p" not in [term.text for term in tree.all("dt")]
    assert "OOD" not in tree.all("section", id="certainty")[0].text


def test_every_section_can_be_reached_and_every_plot_is_described(digits: Content, parsed: Callable) -> None:
    tree = parsed(render(digits))
    goals = {link.attributes["href"] for link in tree.all("nav")[0].all("a")}
    assert goals == {f"#{section.attributes['id']}" for section in tree.all("section") if "id" in section.attributes}
    for plot in tree.all("div", class_="plot"):
        picture = plot.children[0]
        assert picture.attributes["role"] == "img"
        assert len(picture.attributes["aria-label"]) > 20
    assert all("alt" in picture.attributes for picture in tree.all("img"))


def test_the_page_needs_nothing_else(digits: Content, parsed: Callable) -> None:
    page = render(digits)
    tree = parsed(page)
    for tag in ("script", "iframe", "object", "embed", "form", "base", "audio", "video"):
        assert not tree.all(tag)
    for tag in ("a", "img", "link", "use", "image", "source"):
        for element in tree.all(tag):
            for key in ("href", "src", "srcset", "xlink:href"):
                assert re.match(r"(#|data:|$)", element.attributes.get(key, ""))
    style = tree.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [meta for meta in tree.all("meta") if meta.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy.attributes["content"]
    assert not re.search(r"https?://", page)
    assert not any(key.startswith("on") for element in tree.all("svg") for key in element.attributes)


def test_names_are_text_and_nothing_else(table_run: Path, parsed: Callable) -> None:
    page = render(gather([table_run], draws=2, title="<img src=x onerror=alert(1)>", doctor=False))
    tree = parsed(page)
    assert "<script" not in page
    assert not tree.all("img")
    assert not tree.all("b")
    assert tree.all("h1")[0].text == "<img src=x onerror=alert(1)>"
    assert [name.text for name in tree.all("span", class_="run")] == ["<b>run & more"] * len(
        tree.all("span", class_="run")
    )
    assert tree.all("tbody")[0].all("tr")[0].attributes["data-run"] == "<b>run & more"
    cells = [cell.text for cell in tree.all("section", id="examples")[0].all("td")]
    assert "<script>alert(1)</script>" in cells
    assert "a & 'b' \"c\"" in cells


def test_rows_of_a_table_are_shown_in_its_own_units(table_run: Path, parsed: Callable) -> None:
    content = gather([table_run], draws=2, doctor=False)
    group = parsed(render(content, examples=3)).all("section", class_="group")[0]
    headings = [heading.text for heading in group.all("th")]
    assert headings == ["row", "predicted", "certainty", "truth", *"abcdef", "… 2 more"]
    data = content.dataset
    assert data.input_mean is not None
    assert data.input_std is not None
    first = group.all("tr")[1].all("td")
    row = data.test.x[int(first[0].text)] * data.input_std + data.input_mean
    shown = [float(cell.text.replace("−", "-")) for cell in first[4:10]]
    assert shown == pytest.approx(row[:6].tolist(), abs=6e-4, rel=0.05)


def test_examples_are_the_extreme_ones(digits: Content) -> None:
    prediction = digits.runs[1].prediction
    entropy = torch.special.entr(prediction.probs).sum(-1)
    order = sorted(range(len(entropy)), key=lambda i: float(entropy[i]))
    assert most_certain(prediction, 5) == order[:5]
    assert sorted(least_certain(prediction, 5)) == sorted(order[-5:])
    wrong = [i for i in range(len(entropy)) if prediction.probs[i].argmax() != prediction.targets[i]]
    wrong.sort(key=lambda i: -float(prediction.probs[i].max()))
    assert confidently_wrong(prediction, 5) == wrong[:5]


def test_pictures_with_their_predictions(digits: Content, parsed: Callable) -> None:
    tree = parsed(render(digits, examples=3))
    groups = tree.all("details", class_="card")[1].all("section", class_="group")
    names = ["Most certain", "Least certain", "Confidently wrong", f"Confident about {OOD}"]
    assert [group.all("h4")[0].text for group in groups] == names
    assert [len(group.all("img")) for group in groups] == [3, 3, 3, 3]
    prediction = digits.runs[1].prediction
    for row, entry in zip(confidently_wrong(prediction, 3), groups[2].all("li"), strict=True):
        assert entry.attributes["class"] == "wrong"
        assert entry.all("b")[0].text == str(int(prediction.labels[row]))
        assert entry.all("span", class_="truth")[0].text == f"✗ is {int(prediction.targets[row])}"
        assert entry.all("span", class_="sure")[0].text == f"{100 * float(prediction.confidence[row]):.1f} %"
        assert entry.all("img")[0].attributes["alt"] == f"test input {row}"
    assert not groups[3].all("span", class_="truth")


def test_no_examples(digits: Content, parsed: Callable) -> None:
    tree = parsed(render(digits, examples=0))
    assert not tree.all("img")
    assert not tree.all("section", id="examples")
    with pytest.raises(ValueError, match="examples=-1"):
        render(digits, examples=-1)


def test_no_errors(digits: Content, parsed: Callable) -> None:
    run = digits.runs[0]
    perfect = replace(run.prediction, targets=run.prediction.labels)
    tree = parsed(render(replace(digits, runs=[replace(run, prediction=perfect)])))
    assert "Every test input was classified correctly." in tree.all("section", id="examples")[0].text


def test_the_file_is_small_and_written_whole(digits: Content, tmp_path: Path) -> None:
    path = write_report(digits, tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8") == render(digits)
    assert path.stat().st_size < 500_000
    assert list(path.parent.iterdir()) == [path]


def test_what_auto_tried_is_a_table(digits: Content, parsed: Callable) -> None:
    assert "How the method was chosen" not in render(digits)
    row = Tried("<plain>", "chosen", nll=0.3, interval=(0.2, 0.4), scores={"accuracy": 0.9})
    evidence = AutoEvidence(
        "Nothing beat it.", "plain", (row, Tried("swag", "dropped", "worse")), 9, 8, 0, (0.3, 0.2, 0.4), 5
    )
    run = replace(digits.runs[0], result={**digits.runs[0].result, "evidence": evidence.to_dict()})
    page = render(replace(digits, runs=[run]))
    assert "How the method was chosen" in [heading.text for heading in parsed(page).all("h2")]
    assert all(
        text in page for text in ("Nothing beat it.", "&lt;plain&gt;", "0.3000 [0.2000, 0.4000]", "dropped: worse")
    )
