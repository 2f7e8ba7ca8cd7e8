"""Tests of `paredown.optim`."""
