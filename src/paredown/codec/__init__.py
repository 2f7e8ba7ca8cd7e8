"""Numbers on tensors: encode, decode and round, as plain torch defines them and as kernels compute them."""
