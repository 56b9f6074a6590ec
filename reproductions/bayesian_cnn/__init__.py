"""Shridhar et al. (2019): Bayesian convolutional networks with variational inference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from reproductions.bayesian_cnn import tables
from reproductions.bayesian_cnn.networks import size_stages, stages_of
from reproductions.study import ResultTable, Study, Table


def _table(name: str, about: str, finish: Callable[..., ResultTable]) -> Table:
    return Table(about, partial(stages_of, name), finish, seeds=True)


STUDY = Study(
    "Bayesian convolutional networks with variational inference (Shridhar et al. 2019)",
    {
        "1": _table("1", "accuracies, Bayesian and frequentist", tables.accuracy_table),
        "forms": _table("forms", "noise and form of σ, LeNet-5 on MNIST", tables.forms_table),
        "dropout": _table("dropout", "AlexNet on CIFAR-100 beside dropout", tables.dropout_table),
        "pruning": _table("pruning", "accuracy after pruning by magnitude", tables.pruning_table),
        "uncertainty": _table("uncertainty", "aleatoric and epistemic, LeNet-5", tables.uncertainty_table),
        "parameters": Table("parameter counts; not trained", size_stages, tables.parameters_table),
    },
    figures=tables.draw_figures,
)
