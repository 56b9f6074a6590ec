"""Predictions of each kind of target, and the sums over draws that they are made of."""
