"""Tests of `paredown.assignment`."""
