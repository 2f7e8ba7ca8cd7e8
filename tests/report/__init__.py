"""Tests of `paredown.report`."""
