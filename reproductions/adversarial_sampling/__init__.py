"""Zhang et al. (2022): Improving Bayesian neural networks by Adversarial Sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from reproductions.adversarial_sampling import tables
from reproductions.adversarial_sampling.networks import stages_of
from reproductions.study import ResultTable, Study, Table


def _table(name: str, about: str, finish: Callable[..., ResultTable], **options: Any) -> Table:
    return Table(about, partial(stages_of, name), finish, **options)


STUDY = Study(
    "Improving Bayesian neural networks by Adversarial Sampling (Zhang et al. 2022)",
    {
        "1": _table("1", "accuracy of sampled networks, from scratch", partial(tables.accuracy_table, "scratch")),
        "2": _table("2", "the same, fine-tuned from a deterministic network", partial(tables.accuracy_table, "tuned")),
        "3": _table("3", "accuracy on the most certain part of the test set", tables.retained_table),
        "4": _table("4", "accuracy over λ, a figure of the paper as numbers", tables.sweep_table),
        "differences": _table(
            "differences", "ours: with Adversarial Sampling minus without, paired", tables.differences_table, first=True
        ),
        "settings": _table(
            "settings", "ours: the same for changed settings; only if named", tables.settings_table, on_request=True
        ),
    },
    figures=tables.draw_figures,
)
