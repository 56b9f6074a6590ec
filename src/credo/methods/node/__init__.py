"""Node-based Bayesian networks (Trinh et al. 2020, 2022)."""
