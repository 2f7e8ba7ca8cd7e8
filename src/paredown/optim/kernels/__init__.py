"""Optimizer updates and gradient sums as Triton kernels, which `batched_update.py` imports if Triton is installed."""

from paredown.optim.kernels.launch import LaunchGroup, covers, covers_format, covers_squares, fold, square_sums, update_one

__all__ = ["LaunchGroup", "covers", "covers_format", "covers_squares", "fold", "square_sums", "update_one"]
