"""Laplace's approximation around trained weights: structures of the curvature, the pass that finds it, evidence."""
