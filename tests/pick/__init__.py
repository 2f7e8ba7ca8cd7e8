"""Tests of `paredown.pick`."""
