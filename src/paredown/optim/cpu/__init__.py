"""Optimizer updates and gradient sums on the CPU in loops that numba compiles, the same bits as `optim/reference.py`."""
