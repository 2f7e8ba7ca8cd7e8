"""Tests of `paredown.study.tasks`."""
