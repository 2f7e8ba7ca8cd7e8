"""The loss of a chunk of rows as a Triton kernel."""
