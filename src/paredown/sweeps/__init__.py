"""Tasks x plans x seeds: the store of trials, workers and engines."""
