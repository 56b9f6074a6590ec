"""Pruning of posteriors, and removal of units that pruning has emptied."""

from credo.compress.compact import compact, compact_network
from credo.compress.prune import choose_masks, prune, weight_scores
from credo.compress.ranking import signal_to_noise
from credo.compress.sweep import SweepPoint, sweep

__all__ = [
    "SweepPoint",
    "choose_masks",
    "compact",
    "compact_network",
    "prune",
    "signal_to_noise",
    "sweep",
    "weight_scores",
]
