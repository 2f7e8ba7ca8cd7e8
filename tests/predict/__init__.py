"""Tests of `paredown.predict`."""
