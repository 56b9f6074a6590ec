"""Validation, files and other small helpers that do not involve a network."""
