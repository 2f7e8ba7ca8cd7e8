"""Tests of paredown.formats."""
