"""One training step on fake tensors: it runs on the CPU, without values, with the operations of the target device."""
