"""What to train, and what came of it: tasks, trials and sweeps."""
