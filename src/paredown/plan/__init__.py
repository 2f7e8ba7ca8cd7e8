"""What a training step keeps, and what a plan makes of it."""
