"""Measurements of a posterior, the input of the rules."""
