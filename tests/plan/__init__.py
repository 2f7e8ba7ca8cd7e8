"""Tests of `paredown.plan`."""
