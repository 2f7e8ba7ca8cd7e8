"""A plan: which format each slot of a step is stored in, and the bytes that come of it."""
