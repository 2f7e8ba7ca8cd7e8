"""Updates and folding as Triton kernels, the same bits as `optim/reference.py`. Importing this needs Triton: `batched_update.py` checks."""

from paredown.optim.kernels.launch import LaunchGroup, covers, covers_format, covers_squares, fold, square_sums, update_one

__all__ = ["LaunchGroup", "covers", "covers_format", "covers_squares", "fold", "square_sums", "update_one"]
