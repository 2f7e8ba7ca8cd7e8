"""Tests of `paredown.study.pick`."""
