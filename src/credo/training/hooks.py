"""Call what methods do with a pass over the training data, between epochs and after the last one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from credo.core.posterior import Posterior
from credo.methods.pass_file import Saving
from credo.training.epoch_batches import Loader, seeded_epoch


def run_hook(
    name: str,
    posterior: Posterior,
    loader: Loader,
    read: Any,
    *,
    seeds: tuple[int, int],
    saving: Saving,
    **options: Any,
) -> None:
    """Call this method of every part of a posterior that has it; most have none.

    A pass that is killed resumes: its state is beside the checkpoint, until all parts are done.

    Args:
        name: `"end_epoch_"` or `"end_training_"`.
        posterior: The posterior.
        loader: Batches of the training, whose order is seeded.
        read: The same as methods read them.
        seeds: Seed of the training, and number of finished epochs.
        saving: The training's checkpoint, and when it is written.
        options: Arguments of the method beside the loader.
    """
    parts = [part for part in posterior.all_posteriors() if getattr(type(part), name) is not getattr(Posterior, name)]
    files = []
    for index, part in enumerate(parts):
        with seeded_epoch(loader, *seeds, posterior.device):
            file = _beside(saving, index).file(part, loader)
            with nullcontext() if file is None else file.used():
                getattr(part, name)(read, **options)
            files.append(file)
    for file in files:
        if file is not None:
            file.remove()


def _beside(saving: Saving, index: int) -> Saving:
    """Of the pass of a part, in a file of its own."""
    if saving.path is None:
        return saving
    path = Path(saving.path)
    return replace(saving, path=path.with_name(f"{path.stem}.pass-{index}{path.suffix}"))
