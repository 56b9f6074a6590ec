"""Osawa et al. 2019: continual learning."""
