"""Shridhar et al. 2019: Bayesian convolutional networks."""
