"""Osawa et al. 2019: VOGN."""
