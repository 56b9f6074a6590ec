"""Posteriors and training state on disk."""
