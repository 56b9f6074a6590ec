"""Osawa et al. (2019): Practical deep learning with Bayesian principles, VOGN on CIFAR-10."""

from __future__ import annotations

from reproductions.study import Study, Table
from reproductions.vogn.rows import NETWORKS
from reproductions.vogn.search import search_stages, search_table
from reproductions.vogn.tables import table_1, table_1_stages

STUDY = Study(
    "Practical deep learning with Bayesian principles: VOGN on CIFAR-10 (Osawa et al. 2019)",
    {
        "1": Table(
            "optimisers on CIFAR-10; LeNet-5 only, unless --scale paper or --rows name more, as lenet5,alexnet-vogn",
            table_1_stages,
            table_1,
            all_rows=tuple(NETWORKS),
            seeds=True,
        ),
        "search": Table("how the settings of --scale cpu were searched", search_stages, search_table, on_request=True),
    },
)
