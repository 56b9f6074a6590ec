"""Readers of single file formats."""
