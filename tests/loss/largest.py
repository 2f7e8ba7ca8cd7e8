"""The sizes of the tensors that operations return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm")


class LargestTensor(TorchDispatchMode):
    """Records the most elements of a tensor that an operation returns, the names of operations, and the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.shapes: set[torch.Size] = set()
        self.operations: set[str] = set()
        self.product_dtypes: set[torch.dtype] = set()

    def rows_of(self, num_classes: int) -> int:
        """The most rows of a tensor whose last dimension is `num_classes`."""
        return max((shape.numel() // num_classes for shape in self.shapes if shape[-1:] == (num_classes,)), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.operations.add(name)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
                self.shapes.add(leaf.shape)
                if name in PRODUCTS:
                    self.product_dtypes.add(leaf.dtype)
        return result
