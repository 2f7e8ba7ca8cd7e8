"""Tests of `paredown.session`."""
