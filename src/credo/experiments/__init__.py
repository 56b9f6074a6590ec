"""Experiments: a TOML file, a run folder, results."""
