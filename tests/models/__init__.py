"""Tests of paredown.models."""
