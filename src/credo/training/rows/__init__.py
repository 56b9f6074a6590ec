"""Rows of a training: which are held out for a part of it, and which it has seen."""
