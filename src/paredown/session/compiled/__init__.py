"""A session inside the graphs of torch.compile: saved tensors of the graphs are packed as the plan requests."""
