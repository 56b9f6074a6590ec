"""Experiments: TOML files, run folders, results."""
