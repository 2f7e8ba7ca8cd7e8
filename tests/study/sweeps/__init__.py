"""Tests of `paredown.study.sweeps`."""
