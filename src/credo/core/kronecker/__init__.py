"""Kronecker-factored curvature: factors, layer rules and the hooks that collect them."""
