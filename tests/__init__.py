"""Tests of paredown."""
