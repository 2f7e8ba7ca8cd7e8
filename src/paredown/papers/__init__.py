"""PEPPP and the mixed-precision assignments paper as published; PEPPP's configurations are in `simulate/peppp.py`."""
