"""Compiled fast paths, each with a PyTorch fallback of the same meaning."""
