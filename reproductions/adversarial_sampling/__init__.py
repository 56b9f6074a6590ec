"""Zhang et al. 2022: Adversarial Sampling."""
