"""The table of what each option after training cost and gave, from the records of `benchmarks.after_training`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from credo.core.support.files import write_json

TABLE = "table.json"
COLUMNS = ["option", "error %", "NLL", "ECE", "AUROC", "NLL calibrated", "ECE", "AUROC", "fit, s", "predict, s"]
# In the order of the table.
OPTIONS = {
    "plain": "the network as it is",
    "laplace-last": "`Laplace`, last layer",
    "last-layer": "`LastLayer`",
    "laplace-all": "`Laplace`, all layers",
    "swag": "`SWAG`, two epochs",
}
NODE_BNN = Path("results/node-bnn/cpu/pretrained")
NOTES = [
    "ECE with 15 bins. AUROC of the entropy, test images of CIFAR-100 (as many as test images, at most 2,000) against "
    "those of CIFAR-10. Calibrated: `credo.calibrate` on one half of the test images for the other, both ways; all "
    "layers on at most 1,000 and SWAG on at most 500 images of that half.",
    "Processor seconds on one core of a busy machine, of the fit and of predicting 10,000 images: with 10,000 test "
    "images on an Intel Xeon at 2.8 GHz, with 2,000 on an AMD EPYC.",
    "All layers: Kronecker factors with sampled labels. SWAG: SGD with momentum 0.9, lr 0.01, weight decay 1e-4, "
    "batches of 128, flips and crops, 16 draws with running statistics of their own.",
    "iBNN-16: 16 components and 16 passes, fine-tuned on 76,800 (ResNet-20) or 25,600 images, without temperature "
    "scaling ([node-based networks](node-bnn.md)); it was not measured out of distribution.",
]


def write_tables(folder: Path) -> None:
    """Make the table of the records in a folder, beside them."""
    write_json(folder / TABLE, make_table(folder))


def make_table(folder: Path) -> dict[str, Any]:
    """The table of the records in a folder.

    Args:
        folder: With a file for each network, row and number of images.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("resnet*.json")]
    order = list(OPTIONS)
    records.sort(key=lambda r: (r["config"]["network"], -r["config"]["images"], order.index(r["config"]["row"])))
    rows: list[list[Any]] = []
    settings: list[tuple[Any, ...]] = []
    for record in records:
        config = record["config"]
        setting = (config["network"], config["images"], config["train_images"])
        if setting not in settings:
            rows.append([_title(*setting), *[None] * (len(COLUMNS) - 1)])
            settings.append(setting)
            reference = NODE_BNN / f"{config['network']}-ibnn-16.json"
            if config["images"] == 10_000 and reference.exists():
                rows.append(_node_row(json.loads(reference.read_text(encoding="utf-8"))))
        rows.append(_row(OPTIONS[config["row"]], record["numbers"]))
    return {"columns": COLUMNS, "rows": rows, "notes": NOTES}


def _title(network: str, images: int, train_images: int) -> str:
    name = network.replace("resnet", "ResNet-")
    return f"**{name}**, {images:,} test images, {train_images:,} training images"


def _row(option: str, numbers: dict[str, Any]) -> list[Any]:
    plain, calibrated = numbers["as it is"], numbers["calibrated"]
    scores = [f"{plain['error']:.2f}", *_scores(plain), *_scores(calibrated)]
    return [option, *scores, f"{numbers['fit_seconds']:.0f}", f"{numbers['predict_seconds']:.0f}"]


def _scores(found: dict[str, float]) -> list[str]:
    return [f"{found[name]:.3f}" for name in ("nll", "ece", "auroc")]


def _node_row(record: dict[str, Any]) -> list[Any]:
    found = record["numbers"]["16"]
    scores = [f"{found['error']:.2f}", f"{found['nll']:.3f}", f"{found['ece']:.3f}"]
    return ["`NodeBNN`, iBNN-16", *scores, *[None] * 4, f"{record['seconds']:.0f}", None]
