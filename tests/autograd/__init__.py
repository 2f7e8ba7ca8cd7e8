"""Tests of `paredown.autograd`."""
