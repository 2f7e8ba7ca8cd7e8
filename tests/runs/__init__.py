"""Tests of tasks, data and trials."""
