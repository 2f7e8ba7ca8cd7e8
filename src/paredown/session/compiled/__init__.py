"""Packs the saved tensors of torch.compile's graphs as the plan of a session requests."""
