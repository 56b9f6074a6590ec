"""SWAG: moments of the weights that an optimiser visits."""
