"""Packed weights under FSDP2 (`fully_shard`), and the reduction of gradients over processes in 8 bits."""
