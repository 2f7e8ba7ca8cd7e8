"""Tests of `paredown.formats`."""
