"""K-FAC and noisy K-FAC: Kronecker-factored curvature."""
