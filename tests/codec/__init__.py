"""Tests of `paredown.codec`."""
