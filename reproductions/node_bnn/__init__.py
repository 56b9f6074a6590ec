"""Trinh et al. (2020, 2022): node-based Bayesian neural networks."""

from __future__ import annotations

from reproductions.node_bnn import tables
from reproductions.study import Study, Table

STUDY = Study(
    "Node-based Bayesian neural networks (Trinh et al. 2020, 2022)",
    {
        "1": Table(
            "weights and nodes of common networks; counted, not trained", tables.size_stages, tables.sizes_table
        ),
        "2": Table(
            "pretrained ResNets made Bayesian; also ResNet-50 on a folder of images (--data imagenet --root FOLDER)",
            tables.tuned_stages,
            tables.tuned_table,
            all_rows=(),
            data=("imagenet",),
            seeds=True,
        ),
        "scratch": Table(
            "training from random weights, on clean and corrupted images", tables.scratch_stages, tables.scratch_table
        ),
        "gamma": Table("weight of the entropy, under corruption", tables.gamma_stages, tables.gamma_table),
    },
)
