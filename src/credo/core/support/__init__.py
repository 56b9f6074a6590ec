"""Validation, files and other small tools without a network in them."""
