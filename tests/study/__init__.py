"""Tests of `paredown.study`."""
