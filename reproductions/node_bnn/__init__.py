"""Trinh et al. 2020, 2022: node-based Bayesian networks."""
