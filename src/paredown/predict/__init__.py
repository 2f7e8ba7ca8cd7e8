"""What a step takes before anything runs: `trace_step` on fake tensors, compiled steps, and what a device costs, measured (`calibrate`)."""
