"""Weights that are stored packed between the calls of their modules."""
