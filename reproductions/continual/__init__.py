"""Osawa et al. (2019) and Nguyen et al. (2018): continual learning on permuted and split MNIST."""

from __future__ import annotations

from functools import partial

from reproductions.continual.tables import finish, stages_of
from reproductions.study import Study, Table


def _table(name: str, about: str) -> Table:
    return Table(about, partial(stages_of, name), partial(finish, name), seeds=True)


STUDY = Study(
    "Continual learning with natural-gradient posteriors (Osawa et al. 2019)",
    {
        "permuted": _table("permuted", "ten permutations of MNIST, one head"),
        "split": _table("split", "five pairs of digits, a head for each"),
    },
)
