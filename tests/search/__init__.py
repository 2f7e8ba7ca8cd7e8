"""Tests of paredown.session."""
