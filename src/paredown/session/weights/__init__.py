"""Stores weights packed between the calls of their modules."""
