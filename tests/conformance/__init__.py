"""Suites that read the package's own tables: a new row is tested at once."""
