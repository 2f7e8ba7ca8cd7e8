"""Tests of `paredown.search`."""
