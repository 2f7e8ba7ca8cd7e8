"""Tasks, trials and sweeps: what is trained, one run of it, and many runs that survive being killed."""
