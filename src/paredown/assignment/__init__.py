"""Decides for every slot (tensor of a step) under a byte budget: unmodified, packed or recomputed. No model runs here, it is arithmetic."""
