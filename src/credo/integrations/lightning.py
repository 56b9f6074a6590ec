"""A callback for Lightning: draws in tests and predictions, accumulation and clipping of gradients in training."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from credo.core.posterior import Posterior
from credo.core.support.extras import needs
from credo.core.support.validate import checked_count
from credo.integrations.draws import averaged, posterior_optimizer, with_draws

_Callback: Any = object  # lightning.Callback, in the class that is made of it


class _BayesEvaluation(_Callback):  # type: ignore[misc]
    """For a module whose `configure_optimizers` returns one of `credo.optim`.

    In validation, tests and predictions the network returns the average over draws: log-probabilities for
    classes, means otherwise. `accumulate_grad_batches` and `gradient_clip_val` of the Trainer act on the gradients
    of draws.

    Args:
        draws: Number of draws, the same for all batches.
        posterior: Needed for a test without a training before it; else that of the training.
        seed: Seed of the draws.
    """

    def __init__(self, draws: int = 16, *, posterior: Posterior | None = None, seed: int = 0) -> None:
        self.draws, self.posterior, self.seed = checked_count("draws", draws), posterior, seed
        self._block = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.posterior = posterior_optimizer(trainer.optimizers[0]).posterior

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # The last batch of a step runs inside optimizer.step(closure), the others in a block.
        if trainer.fit_loop.epoch_loop._should_accumulate():
            optimizer = posterior_optimizer(trainer.optimizers[0])
            self._block.enter_context(optimizer.sampled_params(train=True))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        parts = trainer.accumulate_grad_batches  # Lightning divides by them, and gathering averages, too
        if parts > 1:
            loss.register_hook(lambda gradient: gradient * parts)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.gradient_clip_val and self.posterior is not None:
            drawn = [p for p in self.posterior.model.parameters() if p.grad is not None]
            by_value = trainer.gradient_clip_algorithm == "value"
            clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(drawn, trainer.gradient_clip_val)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._block.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._block.close()
        self._leave()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter()

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter()

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def _enter(self) -> None:
        posterior = self.posterior
        if posterior is None:
            raise ValueError("No training before: give BayesCallback(posterior=...).")
        network, plain = posterior.model, posterior.model.forward

        def forward(*args: Any, **options: Any) -> Tensor:
            outputs = with_draws(posterior, lambda: plain(*args, **options), draws=self.draws, seed=self.seed)
            if not isinstance(outputs[0], Tensor):
                raise TypeError(f"The network returns {type(outputs[0]).__name__}: only tensors can be averaged.")
            return averaged(posterior, outputs)

        vars(network)["forward"] = forward

    def _leave(self) -> None:
        if self.posterior is not None:
            vars(self.posterior.model).pop("forward", None)


def bayes_callback() -> type[Any]:
    """The class `BayesCallback`; needs lightning."""
    with needs("integrations", "BayesCallback"):
        from lightning import Callback

    class BayesCallback(_BayesEvaluation, Callback):  # type: ignore[misc]
        __doc__ = _BayesEvaluation.__doc__

    return BayesCallback
