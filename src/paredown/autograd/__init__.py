"""Reads a running training step: table of operations, autograd's graph, calls of modules, activation checkpointing."""
