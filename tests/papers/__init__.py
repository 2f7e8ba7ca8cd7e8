"""Tests of `paredown.papers`."""
