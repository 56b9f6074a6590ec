"""Tutorial scripts of Hugging Face and Lightning: at most three changed lines make them Bayesian, and they run."""

import contextlib
import difflib
import io
from pathlib import Path
from typing import Any

import pytest

import credo

# As in Hugging Face's tutorial on text classification, with a small model and data of its own: nothing is downloaded.
HUGGING_FACE = """
import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import Trainer, TrainingArguments, default_data_collator


class Sentences(Dataset):
    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(2, 40, (rows, 6), generator=generator)
        self.labels = (self.tokens < 12).any(1).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        mask = torch.ones(6, dtype=torch.long)
        return {"input_ids": self.tokens[index], "attention_mask": mask, "labels": self.labels[index]}


def compute_metrics(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


torch.manual_seed(0)
sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 8}
model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=40, num_labels=2, **sizes))
arguments = TrainingArguments(
    output_dir="output",
    learning_rate=2e-5,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=2,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Sentences(64, seed=0),
    eval_dataset=Sentences(32, seed=1),
    data_collator=default_data_collator,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
"""
HUGGING_FACE_CHANGES = {
    "from transformers import Trainer, TrainingArguments, default_data_collator": (
        "from transformers import TrainingArguments, default_data_collator\n"
        "from credo.integrations import BayesTrainer as Trainer"
    ),
}

# As in Lightning's introduction in fifteen minutes.
LIGHTNING = """
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, index):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self.model(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
classifier = Classifier()
trainer = L.Trainer(max_epochs=2, **quiet)
trainer.fit(classifier, DataLoader(data, batch_size=16, shuffle=True))
metrics = trainer.test(classifier, DataLoader(data, batch_size=32))[0]
"""
LIGHTNING_CHANGES = {
    "import lightning as L": "import lightning as L\nimport credo.integrations",
    "torch.optim.Adam(self.parameters(), lr=1e-3)": "credo.optim.IVON(self.model, data_size=96, lr=0.1)",
    "L.Trainer(max_epochs=2,": "L.Trainer(callbacks=[credo.integrations.BayesCallback()], max_epochs=2,",
}


def changed(script: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    return script


def count(before: str, after: str) -> int:
    """Lines of the new script that are not in the old one."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in lines)


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(script, "tutorial.py", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore")  # theirs, about workers and versions
@pytest.mark.parametrize(
    ("script", "changes", "packages", "loss"),
    [
        (HUGGING_FACE, HUGGING_FACE_CHANGES, ("transformers", "accelerate"), "eval_loss"),
        (LIGHTNING, LIGHTNING_CHANGES, ("lightning",), "test_loss"),
    ],
    ids=["hugging-face", "lightning"],
)
def test_at_most_three_lines_change(
    script: str,
    changes: dict[str, str],
    packages: tuple[str, ...],
    loss: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in packages:
        pytest.importorskip(package)
    ours = changed(script, changes)
    assert 1 <= count(script, ours) <= 3
    plain = run(script, tmp_path, monkeypatch)
    assert 0 < plain["metrics"][loss] < 2
    found = run(ours, tmp_path, monkeypatch)
    assert 0 < found["metrics"][loss] < 2
    posterior = getattr(found["trainer"], "posterior", None) or found["trainer"].callbacks[0].posterior
    assert isinstance(posterior, credo.IVON)
    assert posterior.steps == (8 if "Sentences" in script else 12)
    assert posterior.is_random
