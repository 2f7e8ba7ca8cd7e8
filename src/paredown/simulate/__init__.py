"""Simulate mode: arithmetic sees rounded values, as in the papers; no memory is saved."""
