"""What one training step keeps: `trace_step` follows it on fake tensors; slots, lifetimes and optimizer state."""
