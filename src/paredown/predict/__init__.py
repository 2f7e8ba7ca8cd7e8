"""Predicts the memory of a training step before it runs (`trace_step`, on fake tensors), and measures a device's costs (`calibrate`)."""
