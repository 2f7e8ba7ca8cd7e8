"""Which plan a new task should take: prior, posterior, acquisition, Pareto front, and the answer with its reasons."""
