"""Kirichenko et al. (2021): a hybrid model that learns a stream without task boundaries."""

from __future__ import annotations

from functools import partial

from reproductions.hcl.tables import finish, stages_of
from reproductions.study import Study, Table


def _table(name: str, about: str) -> Table:
    return Table(about, partial(stages_of, name), partial(finish, name), seeds=True)


STUDY = Study(
    "Task-agnostic continual learning with hybrid probabilistic models (Kirichenko et al. 2021)",
    {
        "split": _table("split", "split MNIST, five tasks, boundaries not given"),
        "baselines": _table("baselines", "a buffer, fine-tuning and all tasks at once on the same stream"),
    },
)
