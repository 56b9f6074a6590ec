"""Conformal sets and intervals: their thresholds, the penalty of RAPS, and how well they do."""
