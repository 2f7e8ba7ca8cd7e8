"""Reads a running training step: the table of operations, autograd's graph, calls of modules, and activation checkpointing."""
