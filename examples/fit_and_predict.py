"""Credo's own loop: train with validation and early stopping, predict, measure, save, load."""

import tempfile
from pathlib import Path

import torch

import credo
from credo.data import Batches, load_dataset, split_validation
from credo.models import build_model

digits = load_dataset("digits")
train, held_out = split_validation(digits.train, size=0.1, seed=0, stratify=True)
loader = Batches(train, batch_size=64, seed=0)
validation = Batches(held_out, batch_size=512, shuffle=False)

model = build_model("convnet", inputs=digits.input_shape, classes=10, channels=[8, 16], hidden=[32], seed=0)
posterior = credo.BBB(model, data_size=len(train), lr=5e-3, prior=0.3, temperature=0.1)
for record in credo.train(posterior, loader, epochs=10, validation=validation, patience=5, schedule="cosine"):
    print(f"epoch {record.epoch:2d}  loss {record.loss:.3f}  validation nll {record.validation['nll']:.3f}")

prediction = credo.predict(posterior, Batches(digits.test, batch_size=512, shuffle=False), draws=32)
photographs = credo.predict(posterior, load_dataset("photo-patches", n=500).test.x, draws=32)
metrics = credo.measure(prediction, outside={"photo-patches": photographs})
for name in ("accuracy", "nll", "ece"):
    low, high = metrics["intervals"][name]
    print(f"{name} {metrics[name]:.3f} ({low:.3f} to {high:.3f})")
print(f"AUROC of entropy for detecting photographs: {metrics['ood']['photo-patches']['entropy']['auroc']:.3f}")

with tempfile.TemporaryDirectory() as folder:
    path = credo.save(posterior, Path(folder) / "digits.safetensors")
    again = credo.predict(credo.load(path), digits.test.x, draws=32, batch_size=512)
print("the loaded posterior predicts the same:", torch.equal(again.probs, prediction.probs))
