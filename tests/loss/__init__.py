"""Tests of `paredown.loss`."""
