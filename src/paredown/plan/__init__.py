"""Plans: which format each slot of a step is stored in, and the bytes that the step takes under a plan."""
