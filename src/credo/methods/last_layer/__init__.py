"""A Bayesian last layer on the features of a trained network, in closed form."""
