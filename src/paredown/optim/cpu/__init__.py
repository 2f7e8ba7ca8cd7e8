"""Optimizer updates and gradient sums in loops that numba compiles, with the bits of `optim/reference.py`."""
