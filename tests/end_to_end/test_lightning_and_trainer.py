"""The optimisers inside the training loops of Lightning and of Hugging Face: the same steps, exact resuming."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo import optim

# Theirs, about workers, loggers and versions.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS: dict[str, dict[str, Any]] = {
    "VOGN": {"lr": 0.05, "draws": 2},
    "OGN": {"lr": 0.05},
    "KFAC": {"lr": 0.05},
    "NoisyKFAC": {"lr": 0.05, "curvature": {"inverse_every": 2}},
    "IVON": {"lr": 0.3, "curvature": 0.9},
}


def make(place: Any, kind: str, model: nn.Module) -> Any:
    return getattr(place, kind)(model, data_size=48, **SETTINGS[kind])


def assert_same(a: nn.Module, b: nn.Module) -> None:
    mine, others = a.state_dict(), b.state_dict()
    assert mine.keys() == others.keys()
    for key, value in mine.items():
        assert not isinstance(value, Tensor) or torch.equal(value, others[key]), key


# -- Lightning -------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=12)


def by_hand(kind: str, *, epochs: int) -> nn.Module:
    posterior = make(credo, kind, network())
    for epoch in range(epochs):
        posterior.lr_scale = 0.5**epoch
        for x, y in loader():
            posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))
    return posterior


def lightning_module(kind: str, *, way: str = "automatic") -> Any:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = network(), way == "automatic"

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            if way == "automatic":
                return F.cross_entropy(self.model(x), y)
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            if way == "blocks":
                with optimizer.sampled_params(train=True):
                    loss = F.cross_entropy(self.model(x), y)
                    self.manual_backward(loss)
                optimizer.step()
            else:
                loss = optimizer.step(closure=lambda: F.cross_entropy(self.model(x), y))
            if self.trainer.is_last_batch:
                scheduler.step()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make(optim, kind, self.model)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Classifier()


def lightning_trainer(folder: Path, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(default_root_dir=folder, **{**quiet, "enable_checkpointing": False, **options})


def posterior_of(module: Any) -> Any:
    return module.optimizers(use_pl_optimizer=False).posterior


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for kind in SETTINGS
        for way in ("automatic", "closure", "blocks")
        if way != "blocks" or "draws" not in SETTINGS[kind]  # a block is one draw
    ],
)
def test_lightning_makes_the_posteriors_steps_bit_for_bit(kind: str, way: str, tmp_path: Path) -> None:
    module = lightning_module(kind, way=way)
    lightning_trainer(tmp_path, max_epochs=2).fit(module, loader())
    assert_same(posterior_of(module), by_hand(kind, epochs=2))


@pytest.mark.parametrize("kind", SETTINGS)
def test_lightning_resumes_exactly(kind: str, tmp_path: Path) -> None:
    first = lightning_trainer(tmp_path, max_epochs=1)
    first.fit(lightning_module(kind), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    module = lightning_module(kind)
    lightning_trainer(tmp_path, max_epochs=3).fit(module, loader(), ckpt_path=tmp_path / "first.ckpt")
    assert_same(posterior_of(module), by_hand(kind, epochs=3))


def test_lightnings_own_accumulation_is_refused_instead_of_losing_batches(tmp_path: Path) -> None:
    trainer = lightning_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="own parameters have gradients"):
        trainer.fit(lightning_module("IVON"), loader())


# -- Trainer of Hugging Face -------------------------------------------------------------------------------------------


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(20, (48, 5), generator=generator), torch.randint(2, (48,), generator=generator)
    return [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=5, num_labels=2, **sizes, **still)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def bayes_trainer(kind: str, folder: Path, seen: list[Any], **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class BayesTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Tensor:
            seen.append((copy.deepcopy(dict(inputs)), self.optimizer.param_groups[0]["lr"]))
            plain = super().training_step
            loss: Tensor = self.optimizer.optimizer.gather(lambda: plain(model, inputs, *args, **options))
            return loss

    quiet = {"disable_tqdm": True, "report_to": "none", "use_cpu": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(folder), max_grad_norm=0, num_train_epochs=2, per_device_train_batch_size=12, **{**quiet, **options}
    )
    model = bert()
    optimizer = make(optim, kind, model)
    return BayesTrainer(model=model, args=arguments, train_dataset=sentences(), optimizers=(optimizer, None))


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_trainer_makes_the_posteriors_steps(kind: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    trainer = bayes_trainer(kind, tmp_path, seen, save_strategy="no")
    trainer.train()
    posterior = make(credo, kind, bert())
    posterior.model.train()
    rates = [rate / SETTINGS[kind]["lr"] for _, rate in seen]
    assert rates == pytest.approx([1 - step / 8 for step in range(8)])  # the Trainer's own linear schedule
    for (inputs, _), posterior.lr_scale in zip(seen, rates, strict=True):
        posterior.step(lambda net, inputs=inputs: net(**inputs).loss)
    for key, value in posterior.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_trainer_resumes_exactly(kind: str, tmp_path: Path) -> None:
    whole = bayes_trainer(kind, tmp_path, [], save_strategy="steps", save_steps=3)
    whole.train()
    again = bayes_trainer(kind, tmp_path / "again", [], save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(again.optimizer.optimizer.posterior, whole.optimizer.optimizer.posterior)
