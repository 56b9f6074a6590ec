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
        "baselines": _table("baselines", "a posterior, a buffer, fine-tuning, all tasks at once; VCL and VOGN"),
        "recurrence": _table("recurrence", "MNIST, Fashion-MNIST, and MNIST again"),
        "features": _table("features", "split CIFAR-10 on frozen features of a ResNet-20 trained on CIFAR-100"),
    },
)
