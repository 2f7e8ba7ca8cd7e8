"""Fixtures of several files of this folder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paredown.optim.packed_weight import Weight


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """Records every memory that weights are decoded into."""
    found: list[StorageWeakRef] = []
    decode = Weight.decode

    def watched(self: Weight, dtype: torch.dtype | None = None) -> Tensor:
        out = decode(self, dtype)
        found.append(StorageWeakRef(out.untyped_storage()))
        return out

    monkeypatch.setattr(Weight, "decode", watched)
    return found
