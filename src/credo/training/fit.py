"""`fit`: a whole training by `train`, with a progress bar on an interactive terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from credo.core.posterior import Posterior, Terms
from credo.core.support.keywords import checked_keywords
from credo.core.support.progress import make_progress
from credo.training.epoch_batches import Loader
from credo.training.loop import EpochRecord, OnStep, check_posterior, train
from credo.training.rank_zero import is_first


@checked_keywords(train)
def fit(posterior: Posterior, loader: Loader, *, epochs: int, progress: bool = True, **options: Any) -> Posterior:
    """Train the posterior and return it.

    Args:
        posterior: Any method.
        loader: Batches, see `train`.
        epochs: Number of epochs.
        progress: Show a progress bar; only on an interactive terminal.
        **options: Options of `train`.
    """
    check_posterior(posterior)
    for _ in (shown if progress else train)(posterior, loader, epochs=epochs, **options):
        pass
    return posterior


def shown(
    posterior: Posterior,
    loader: Loader,
    *,
    epochs: int,
    description: str = "training",
    on_step: OnStep | None = None,
    **options: Any,
) -> Iterator[EpochRecord]:
    """Run `train` with a bar over all steps that shows loss, NLL, KL and the last validation; on rank 0 only.

    Args:
        posterior: As in `train`.
        loader: As in `train`.
        epochs: As in `train`.
        description: Text before the bar.
        on_step: As in `train`.
        **options: Further options of `train`.
    """
    if not is_first(posterior.process_group):
        yield from train(posterior, loader, epochs=epochs, on_step=on_step, **options)
        return
    with make_progress() as bar:
        task = bar.add_task(description, total=None, text="")  # `train` raises if the loader has no length
        last = ""

        def _update(epoch: int, done: int, batches: int, terms: Terms) -> None:
            steps = (epoch - 1) * batches + done
            bar.update(task, completed=steps, total=epochs * batches, text=f"{_terms(terms)} {last}")
            if on_step is not None:
                on_step(epoch, done, batches, terms)

        for record in train(posterior, loader, epochs=epochs, on_step=_update, **options):
            last = " ".join(f"val {key} {value:.4f}" for key, value in record.validation.items())
            bar.update(task, completed=record.epoch * len(loader), total=epochs * len(loader))
            yield record


def _terms(terms: Terms) -> str:
    kl = "" if terms.kl is None else f" kl {terms.kl:.0f}"
    return f"loss {terms.loss:.4f} nll {terms.nll:.4f}{kl}"
