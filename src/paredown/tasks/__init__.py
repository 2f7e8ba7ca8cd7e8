"""Tasks: a model, data and steps; training one under a plan gives a Trial."""
