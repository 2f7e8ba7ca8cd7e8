"""Tests of `paredown.study.papers`."""
