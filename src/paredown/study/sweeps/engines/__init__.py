"""Engines: objects that run the trials of a sweep, in this process, in local ones, in CUDA graphs, or on a Ray cluster."""
