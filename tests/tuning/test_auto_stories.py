"""The stories of docs/auto.md in small, without data of CREDO_DATA: a trained conv net, and texts as embeddings."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.data import Batches, Split, load_dataset
from credo.models import build_model

MODULES: tuple[tuple[str, ...], ...] = (
    ("argparse", "configparser", "csv", "json", "pathlib", "tempfile", "shutil", "zipfile", "tarfile", "gzip"),
    ("asyncio", "socket", "ssl", "http.client", "urllib.request", "ftplib", "smtplib", "imaplib", "threading", "queue"),
)


@pytest.mark.slow
def test_a_trained_resnet_keeps_or_improves_its_held_out_nll() -> None:
    digits = load_dataset("digits")
    seen, rows = digits.train.subset(range(600)), digits.train.subset(range(600, 900))
    network = build_model("resnet-cifar", inputs=[1, 8, 8], classes=10, depth=8, seed=0)
    batches, held_out = Batches(seen, batch_size=100), Batches(rows, batch_size=100, shuffle=False)
    trained = credo.fit(credo.MAP(network, data_size=600, lr=1e-2), batches, epochs=4, progress=False).model
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    found = credo.auto(trained, batches, held_out, trained=True, passes=1, latency=1, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.state_dict().items())
    evidence = found.evidence
    assert evidence is not None
    tried = {row.name: row for row in evidence.rows}
    assert {"plain", "laplace-last"} <= {name for name, row in tried.items() if row.nll is not None}
    assert tried["swag"].state == "left out"  # latency=1 allows no average
    assert tried[evidence.chosen].nll <= tried["plain"].nll  # type: ignore[operator]
    assert evidence.report_rows == 100
    assert tried[evidence.chosen].report["accuracy"] > 0.8


def _texts() -> tuple[list[str], Tensor]:
    """First lines of documentation of the standard library, and which of two groups of modules they are of."""
    texts, labels = [], []
    for label, names in enumerate(MODULES):
        for name in names:
            for line in _lines_of(__import__(name, fromlist=["x"])):
                texts.append(line)
                labels.append(label)
    return texts, torch.tensor(labels)


def _lines_of(module: Any) -> list[str]:
    things: list[Callable[..., Any] | type] = [
        thing
        for _, thing in sorted(vars(module).items())
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ == module.__name__
    ]
    methods = [one for each in things if inspect.isclass(each) for _, one in sorted(vars(each).items())]
    docs = [inspect.getdoc(one) for one in (*things, *methods) if callable(one)]
    return [doc for doc in dict.fromkeys(docs) if doc and len(doc) > 40]


def _embedded(texts: list[str], width: int = 48) -> Tensor:
    """Sums of random vectors of their words, normalised: what an encoder that knows no language makes of them."""
    words = [[word for word in text.lower().split() if word.isalpha()] for text in texts]
    known = sorted({word for each in words for word in each})
    vectors = torch.randn(len(known), width, generator=torch.Generator().manual_seed(0))
    place = {word: index for index, word in enumerate(known)}
    sums = torch.stack([vectors[[place[word] for word in each]].sum(0) for each in words])
    return nn.functional.normalize(sums, dim=1) * width**0.5


def test_texts_as_embeddings() -> None:
    texts, labels = _texts()
    x, order = _embedded(texts), torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))
    known, new = Split(x[order[150:]], labels[order[150:]]), Split(x[order[:150]], labels[order[:150]])
    posterior = credo.auto(
        lambda: nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 2)),
        Batches(known, batch_size=32),
        passes=20,
        progress=False,
    )
    scores = credo.measure(credo.predict(posterior, [(new.x, new.y)]))
    share = new.y.double().mean()
    constant = float(-(share * share.log() + (1 - share) * (1 - share).log()))
    assert scores["nll"] < constant - 0.05
    assert scores["accuracy"] > float(torch.maximum(share, 1 - share)) + 0.05
    assert posterior.evidence is not None
    assert posterior.evidence.chosen in str(posterior.evidence)
