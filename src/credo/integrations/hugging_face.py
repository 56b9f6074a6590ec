"""Hugging Face's Trainer with a posterior: its loop, schedules, checkpoints; draws in training and evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo import optim
from credo.core.errors import unknown
from credo.core.support.extras import needs
from credo.core.support.validate import checked_count
from credo.integrations.draws import averaged, posterior_optimizer, with_draws

_METHODS = {"ivon": optim.IVON, "vogn": optim.VOGN, "ogn": optim.OGN, "kfac": optim.KFAC, "noisy-kfac": optim.NoisyKFAC}
_Trainer: Any = object  # transformers.Trainer, in the class that is made of it


class _BayesTraining(_Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that trains a posterior and evaluates with its draws.

    `learning_rate` and `weight_decay` of the arguments are AdamW's and not used: give `lr` in `method_options`. The
    schedule is the Trainer's. `gradient_accumulation_steps` above 1 needs IVON; the mean losses of its batches are
    averaged, each counting the same. `max_grad_norm` clips the gradient of each pass.

    Args:
        args: Arguments of `Trainer`.
        method: `"ivon"`, `"vogn"`, `"ogn"`, `"kfac"` or `"noisy-kfac"`.
        method_options: Further arguments of the method, such as `{"lr": 0.1}`.
        draws: Draws of weights that `evaluate` and `predict` average over.
        options: Keyword arguments of `Trainer`; `optimizers=(credo.optim...., None)` replaces `method`.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        method: str = "ivon",
        method_options: dict[str, Any] | None = None,
        draws: int = 16,
        **options: Any,
    ) -> None:
        if method not in _METHODS:
            raise ValueError(unknown("method of BayesTrainer", method, _METHODS))
        self.method, self.method_options = method, dict(method_options or {})
        self.draws = checked_count("draws", draws)
        self.last_loss, self.last_norm = torch.zeros(()), torch.zeros(())
        super().__init__(*args, **options)

    @property
    def posterior(self) -> Any:
        """For `credo.predict`, `credo.save` and everything else; there is one once training has begun."""
        return posterior_optimizer(self.optimizer).posterior

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the posterior, for as many examples as the training data has."""
        if self.optimizer is None:
            options = {"data_size": len(self.train_dataset), **self.method_options}
            self.optimizer = _METHODS[self.method](self.model, **options)
        if self.args.gradient_accumulation_steps > 1 and not isinstance(self.optimizer, optim.IVON):
            raise ValueError(
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}: only IVON can accumulate in "
                "the Trainer; set it to 1 and raise per_device_train_batch_size."
            )
        made: torch.optim.Optimizer = self.optimizer
        return made

    def create_scheduler(self, num_training_steps: int, *args: Any, **options: Any) -> Any:
        """Choose what was left open for the length of the training, as `credo.fit` does; then the schedule."""
        if self.posterior.steps == 0:
            epochs = max(1, round(self.args.num_train_epochs))
            self.posterior.plan_training_(steps=num_training_steps, epochs=epochs)
        return super().create_scheduler(num_training_steps, *args, **options)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Tensor:
        """Run forward and backward at a draw; the gradients count for the next step of the optimiser."""
        plain, optimizer, reported = super().training_step, posterior_optimizer(self.optimizer), torch.zeros(())

        def closure() -> Tensor:
            nonlocal reported
            reported = plain(model, inputs)  # without num_items_in_batch: the loss is the mean of this batch
            if self.args.max_grad_norm:
                drawn = [p for p in optimizer.posterior.model.parameters() if p.grad is not None]
                self.last_norm = nn.utils.clip_grad_norm_(drawn, self.args.max_grad_norm)
            return self.last_loss

        optimizer.gather(closure)
        return reported

    def compute_loss(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        """The Trainer may divide by the parts of an accumulated batch, which gathering averages over, too."""
        found = super().compute_loss(model, *args, **options)
        if model.training and isinstance(found, Tensor) and found.requires_grad:
            self.last_loss = found.detach()
            found.register_hook(torch.ones_like)
        return found

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Average over draws: logits are log-probabilities of the average, and the loss is theirs."""
        plain = super().prediction_step
        if self.optimizer is None:
            return plain(model, inputs, prediction_loss_only, ignore_keys)
        run = lambda: plain(model, dict(inputs), False, ignore_keys)  # noqa: E731
        found = with_draws(self.posterior, run, draws=self.draws, seed=self.args.seed)
        labels, losses = found[0][2], [loss for loss, _, _ in found if loss is not None]
        loss = torch.stack(losses).mean() if losses else None
        if not isinstance(found[0][1], Tensor):
            raise TypeError("BayesTrainer averages logits alone: let the model return no hidden states.")
        logits = averaged(self.posterior, [logits for _, logits, _ in found])
        if isinstance(labels, Tensor) and labels.dtype is torch.long and (logits.dim(), labels.dim()) == (2, 1):
            loss = F.cross_entropy(logits, labels)
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.last_norm  # clipped in each pass


def bayes_trainer() -> type[Any]:
    """The class `BayesTrainer`; needs transformers and accelerate."""
    with needs("integrations", "BayesTrainer"):
        from transformers import Trainer

    class BayesTrainer(_BayesTraining, Trainer):  # type: ignore[misc]
        __doc__ = _BayesTraining.__doc__

    return BayesTrainer
