"""Tests of `paredown.check`."""
