"""Tests of `paredown.trace`."""
