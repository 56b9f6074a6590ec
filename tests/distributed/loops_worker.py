"""Two processes of torchrun's launcher inside loops of others: `loops_worker.py torch|lightning|transformers FOLDER`.

Each leaves in the folder what it found: the message without `credo.distribute`, the numbers with it, and those of one
process with the whole batches.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo import optim

SETTINGS: dict[str, dict[str, Any]] = {
    "VOGN": {"lr": 0.05, "curvature": {"init": 0.5}, "draws": 2},
    "OGN": {"lr": 0.05},
    "KFAC": {"lr": 0.05},
    "NoisyKFAC": {"lr": 0.05, "curvature": {"inverse_every": 2}},
    "IVON": {"lr": 0.3, "curvature": 0.9},
}
EXAMPLES, BATCH = 48, 12


def make(place: Any, kind: str, model: nn.Module) -> Any:
    return getattr(place, kind)(model, data_size=EXAMPLES, **SETTINGS[kind])


def numbers(posterior: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in posterior.state_dict().items() if isinstance(value, Tensor)}


def one_process(kind: str, model: nn.Module, loss: Callable[..., Tensor], seen: Any) -> dict[str, Tensor]:
    """The same steps on what both have seen, at rates that fall linearly."""
    both: list[Any] = [None, None]
    dist.all_gather_object(both, seen)
    posterior = make(credo, kind, model.train())
    credo.distribute(posterior, noise="shared", independent=True)
    for step, (first, second) in enumerate(zip(*both, strict=True)):
        batch = {key: torch.cat([first[key], second[key]]) for key in first}
        posterior.lr_scale = 1 - step / len(seen)
        posterior.step(lambda net, batch=batch: loss(net, batch))
    return numbers(posterior)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss_of(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["y"])


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (EXAMPLES,), generator=generator)


def by_torch(kind: str, folder: Path, *, distributed: bool) -> tuple[Any, dict[str, Tensor]]:
    """A loop as it is written for DistributedDataParallel."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net, rank = network(), dist.get_rank()
    optimizer = make(optim, kind, net)
    wrapped = nn.parallel.DistributedDataParallel(net)
    if distributed:
        credo.distribute(optimizer.posterior, noise="shared", batchnorm="sync")
    x, y = (part.split(BATCH // 2)[rank::2] for part in table())
    seen = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    for step, batch in enumerate(seen):
        optimizer.param_groups[0]["lr"] = SETTINGS[kind]["lr"] * (1 - step / len(seen))
        optimizer.step(lambda batch=batch: loss_of(wrapped, batch))
    return optimizer.posterior, one_process(kind, network(), loss_of, seen)


def by_lightning(kind: str, folder: Path, *, distributed: bool) -> tuple[Any, dict[str, Tensor]]:
    import lightning

    seen: list[dict[str, Tensor]] = []

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            named = dict(zip("xy", batch, strict=True))
            if self.global_step == len(seen):  # a step with two draws comes here twice
                seen.append(named)
            return loss_of(self.model, named)

        def configure_optimizers(self) -> Any:
            optimizer = make(optim, kind, self.model)
            if distributed:
                credo.distribute(optimizer.posterior, noise="shared", batchnorm="sync")
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * EXAMPLES // BATCH)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        default_root_dir=folder,
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        enable_checkpointing=False,
        **quiet,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(TensorDataset(*table()), batch_size=BATCH // 2))
    return module.optimizers(use_pl_optimizer=False).posterior, one_process(kind, network(), loss_of, seen)


def by_trainer(kind: str, folder: Path, *, distributed: bool) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    seen: list[dict[str, Tensor]] = []

    def bert() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=5, num_labels=2, **sizes, **still)
        model: nn.Module = transformers.BertForSequenceClassification(config)
        return model.double()

    class BayesTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Tensor:
            seen.append({key: value.clone() for key, value in inputs.items()})
            plain = super().training_step
            loss: Tensor = self.optimizer.optimizer.gather(lambda: plain(model, inputs, *args, **options))
            return loss

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(20, (EXAMPLES, 5), generator=generator)
    labels = torch.randint(2, (EXAMPLES,), generator=generator)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_grad_norm=0,
        num_train_epochs=2,
        per_device_train_batch_size=BATCH // 2,
        average_tokens_across_devices=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
    )
    model = bert()
    optimizer = make(optim, kind, model)
    if distributed:
        credo.distribute(optimizer.posterior, noise="shared")
    examples = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
    BayesTrainer(model=model, args=arguments, train_dataset=examples, optimizers=(optimizer, None)).train()
    return optimizer.posterior, one_process(kind, bert(), lambda net, batch: net(**batch).loss, seen)


def work(package: str, folder: str) -> None:
    warnings.simplefilter("ignore")  # theirs, about workers, loggers and versions
    torch.set_num_threads(1)
    train = {"torch": by_torch, "lightning": by_lightning, "transformers": by_trainer}[package]
    message = ""
    try:
        train("IVON", Path(folder), distributed=False)
    except RuntimeError as error:
        message = str(error)
    found: dict[str, Any] = {"message": message}
    for kind in SETTINGS:
        posterior, alone = train(kind, Path(folder), distributed=True)
        found[kind] = {"together": numbers(posterior), "alone": alone}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # What is imported late, by a first optimiser or by a name that is asked for, is imported once for both processes.
    imported = __import__(sys.argv[1])
    make(optim, "IVON", nn.Linear(1, 1)).zero_grad()
    if sys.argv[1] == "transformers":
        imported.Trainer, imported.BertForSequenceClassification(imported.BertConfig(num_hidden_layers=1))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, work)(*sys.argv[1:])
