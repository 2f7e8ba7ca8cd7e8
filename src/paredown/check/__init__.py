"""Checks plans: gradients against the baseline (`verify`), sensitive slots of a step (`probe`), rounding errors in training (`Guard`)."""
