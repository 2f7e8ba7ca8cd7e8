"""What one training step stores: `trace_step` runs it on fake tensors and records slots, lifetimes and optimizer state."""
