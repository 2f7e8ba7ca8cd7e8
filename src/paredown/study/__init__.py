"""Many trainings: tasks, sweeps, `pick`, the papers' methods, reports. The rest of the package imports none of it."""
