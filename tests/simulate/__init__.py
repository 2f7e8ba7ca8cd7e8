"""Tests of `paredown.simulate`."""
