"""A plan at work on an unmodified model."""
