"""Tests of `paredown.assign`."""
