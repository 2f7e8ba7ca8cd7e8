"""A plan put onto an unmodified model."""
