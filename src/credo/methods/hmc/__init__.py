"""Hamiltonian Monte Carlo over all training data."""
