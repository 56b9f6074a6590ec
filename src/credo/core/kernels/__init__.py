"""Compiled fast paths with a PyTorch path behind each: same meaning, other speed."""
