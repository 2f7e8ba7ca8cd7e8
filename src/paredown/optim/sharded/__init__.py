"""Weights, gradients and optimizer state of models that several processes share: FSDP2 (`fully_shard`) and 8-bit reductions."""
