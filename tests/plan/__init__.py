"""Tests of paredown.plan."""
