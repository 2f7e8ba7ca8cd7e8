"""Tests of `paredown.study.report`."""
