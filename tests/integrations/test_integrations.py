"""`BayesTrainer` and `BayesCallback`: a script with a few changed lines, accumulation, clipping, draws; loggers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo import optim
from credo.integrations import log_to

# Theirs, about workers, loggers and versions.
theirs = pytest.mark.filterwarnings("ignore")


# -- Hugging Face ------------------------------------------------------------------------------------------------------


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


def trainer(folder: Path, *, method: str = "ivon", lr: float = 0.3, draws: int = 8, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from credo.integrations import BayesTrainer

    quiet = {
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    sizes = {"num_train_epochs": 2, "per_device_train_batch_size": 12, "max_grad_norm": 0}
    arguments = transformers.TrainingArguments(str(folder), **{**quiet, **sizes, **options})
    data = sentences()
    settings = {"method": method, "method_options": {"lr": lr}, "draws": draws}
    return BayesTrainer(model=bert(), args=arguments, train_dataset=data, eval_dataset=data, **settings)


def by_hand(batches: list[Any], *, parts: int, clip: float = 0.0) -> Any:
    """The same steps with blocks; the rows are in the Trainer's order."""
    model = bert()
    optimizer = optim.IVON(model, data_size=48, lr=0.3)
    steps = len(batches) // parts
    optimizer.posterior.plan_training_(steps=steps, epochs=2)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / steps)
        for inputs in batches[parts * step : parts * step + parts]:
            with optimizer.sampled_params(train=True):
                F.cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"]).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return optimizer.posterior


@theirs
@pytest.mark.parametrize(("parts", "clip"), [(1, 0.0), (2, 0.0), (1, 0.05), (2, 0.05)])
def test_the_trainer_accumulates_and_clips(parts: int, clip: float, tmp_path: Path) -> None:
    ours = trainer(tmp_path, max_grad_norm=clip, gradient_accumulation_steps=parts)
    seen: list[Any] = []
    plain = ours.compute_loss
    ours.compute_loss = lambda model, inputs, *a, **o: seen.append(dict(inputs)) or plain(model, inputs, *a, **o)
    ours.train()
    assert len(seen) == 8
    expected = by_hand(seen, parts=parts, clip=clip)
    assert ours.posterior.steps == expected.steps == 8 // parts
    assert 0.5 < ours.state.log_history[-1]["train_loss"] < 0.9
    for key, value in expected.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], value, rtol=1e-3, atol=1e-5)
    if clip:
        unclipped = by_hand(seen, parts=parts)
        name = "classifier.weight"
        assert not torch.allclose(unclipped.model.get_parameter(name), ours.model.get_parameter(name), atol=1e-4)
    torch.testing.assert_close(ours.posterior.std(), expected.std(), rtol=1e-3, atol=1e-6)


@theirs
def test_evaluation_averages_probabilities_over_draws(tmp_path: Path) -> None:
    ours = trainer(tmp_path, draws=16)
    ours.train()
    before = ours.posterior.generator.get_state()
    metrics, again = ours.evaluate(), ours.evaluate()
    assert metrics["eval_loss"] == again["eval_loss"]
    assert torch.equal(ours.posterior.generator.get_state(), before)
    tokens = torch.stack([row["input_ids"] for row in sentences()])
    labels = torch.stack([row["labels"] for row in sentences()])
    found = ours.predict(sentences())
    probs = torch.tensor(found.predictions).exp()
    torch.testing.assert_close(probs.sum(-1), torch.ones(48))
    expected = credo.predict(ours.posterior, {"input_ids": tokens}, draws=16, seed=42, strategy="loop")
    assert isinstance(expected, credo.ClassPrediction)
    torch.testing.assert_close(probs, expected.probs.float(), rtol=1e-3, atol=1e-4)
    loss = F.nll_loss(probs.log(), labels).item()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    mean = ours.model.eval()(input_ids=tokens).logits.softmax(-1)
    assert not torch.allclose(probs, mean, atol=1e-5)


@theirs
def test_methods_that_cannot_accumulate_are_an_error(tmp_path: Path) -> None:
    ours = trainer(tmp_path, method="ogn", lr=0.01, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="only IVON can accumulate"):
        ours.train()
    with pytest.raises(ValueError, match="ivno"):
        trainer(tmp_path, method="ivno")


@theirs
def test_the_trainer_takes_adapters(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    credo.lora(ours.model, rank=2, train="classifier.*")
    ours.train()
    assert sum("lora_" in name for name in ours.posterior.draw()) == 4
    size = credo.save(ours.posterior, tmp_path / "p.safetensors").stat().st_size
    assert size < sum(p.numel() for p in ours.model.parameters()) * 4 + 20_000
    assert math.isfinite(ours.evaluate()["eval_loss"])


# -- Lightning ---------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows()), batch_size=12)


def module() -> Any:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def test_step(self, batch: Any, index: int) -> None:
            self.log("nll", F.cross_entropy(self.model(batch[0]), batch[1]), batch_size=len(batch[1]))

        def predict_step(self, batch: Any, index: int) -> Tensor:
            out: Tensor = self.model(batch[0])
            return out

        def configure_optimizers(self) -> Any:
            return optim.IVON(self.model, data_size=48, lr=0.3)

    return Classifier()


def lightning_trainer(folder: Path, callback: Any, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(
        default_root_dir=folder, enable_checkpointing=False, max_epochs=2, callbacks=[callback], **{**quiet, **options}
    )


@theirs
@pytest.mark.parametrize(("parts", "clip"), [(1, None), (2, None), (1, 0.05), (2, 0.05)])
def test_lightning_accumulates_and_clips(parts: int, clip: float | None, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from credo.integrations import BayesCallback

    ours, callback = module(), BayesCallback()
    lightning_trainer(tmp_path, callback, accumulate_grad_batches=parts, gradient_clip_val=clip).fit(ours, loader())
    model = network()
    optimizer = optim.IVON(model, data_size=48, lr=0.3)
    for _ in range(2):
        for index, (x, y) in enumerate(loader()):
            with optimizer.sampled_params(train=True):
                F.cross_entropy(model(x), y).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
            if index % parts == parts - 1:
                optimizer.step()
    assert callback.posterior.steps == optimizer.posterior.steps == 8 // parts
    for key, value in model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], value, rtol=1e-4, atol=1e-6)


@theirs
def test_lightning_tests_and_predicts_with_draws(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from credo.integrations import BayesCallback

    ours, callback = module(), BayesCallback(draws=16, seed=5)
    runner = lightning_trainer(tmp_path, callback)
    runner.fit(ours, loader())
    x, y = rows()
    probs = torch.cat(runner.predict(ours, loader())).exp()
    expected = credo.predict(callback.posterior, x, draws=16, seed=5, strategy="loop")
    assert isinstance(expected, credo.ClassPrediction)
    torch.testing.assert_close(probs, expected.probs.float(), rtol=1e-4, atol=1e-5)
    nll = runner.test(ours, loader(), verbose=False)[0]["nll"]
    assert nll == pytest.approx(F.nll_loss(probs.log(), y).item(), rel=1e-4)
    assert "forward" not in vars(ours.model)
    alone = lightning_trainer(tmp_path, BayesCallback(draws=16, seed=5, posterior=callback.posterior))
    assert alone.test(ours, loader(), verbose=False)[0]["nll"] == nll
    with pytest.raises(ValueError, match="posterior="):
        lightning_trainer(tmp_path, BayesCallback()).test(ours, loader(), verbose=False)


# -- loggers -----------------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self, method: str) -> None:
        self.seen: list[tuple[str, float, int]] = []
        setattr(self, method, self.scalar if method == "add_scalar" else self.mapping)

    def scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))

    def mapping(self, values: dict[str, float], *, step: int) -> None:
        self.seen += [(name, value, step) for name, value in values.items()]


@pytest.mark.parametrize("method", ["add_scalar", "log_metrics", "log"])
def test_loggers_get_the_numbers_of_each_epoch(method: str) -> None:
    writer = Writer(method)
    log, batches = log_to(writer), [rows()]
    records = []
    for record in credo.train(credo.MAP(network(), data_size=48), batches, epochs=2, validation=batches):
        log(record)
        records.append(record)
    found = {(name, step): value for name, value, step in writer.seen}
    for record in records:
        assert found["train/loss", record.epoch] == record.loss
        assert found["validation/nll", record.epoch] == record.validation["nll"]
    with pytest.raises(TypeError, match="no logger"):
        log_to(3)
