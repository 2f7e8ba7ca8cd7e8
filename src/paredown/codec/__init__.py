"""The codec: encode, decode and round tensors, in plain torch (the definition) and in Triton kernels."""
