"""Tests of paredown.codec."""
