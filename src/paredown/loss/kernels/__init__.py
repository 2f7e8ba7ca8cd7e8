"""The loss of a chunk in Triton."""
