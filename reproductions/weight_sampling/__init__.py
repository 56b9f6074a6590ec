"""Zhang and Chen 2020: Bayesian weight sampling against input perturbations."""
