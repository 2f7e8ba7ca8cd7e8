"""A choice for every slot under a byte budget: keep, pack or recompute. Arithmetic alone; no model runs here."""
