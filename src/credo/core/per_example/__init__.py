"""Sums of squared per-example gradients, at about the price of the gradient itself."""
