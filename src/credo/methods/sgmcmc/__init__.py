"""Stochastic-gradient samplers: SGLD and SGHMC."""
