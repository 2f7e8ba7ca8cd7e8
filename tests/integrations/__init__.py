"""Tests of `paredown.integrations`."""
