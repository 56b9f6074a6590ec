"""Bayes by Backprop: a mean-field Gaussian trained by reparameterised gradients."""
