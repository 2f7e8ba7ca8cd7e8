"""Tests of `paredown.tasks`."""
