"""Tests of `paredown.sweeps`."""
