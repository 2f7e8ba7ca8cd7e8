"""`RowsInRegisters`: Inductor's kernels that reduce rows of up to 4096 values hold a whole row, and read it once.

By itself Inductor holds rows of up to 1024 values ("persistent reductions"); longer ones are read again for each reduction, and once more
for the result. In the graphs of a session a value that is read is also decoded, and one that is written is often quantized by its row, so
that reading again costs more than it does in torch's own graphs.
"""

# pyright: reportMissingTypeStubs=false, reportIncompatibleMethodOverride=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, final

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

# The kernels of a step of a Llama-like network of width 2048 with FP8 products take 23.4, 22.8 and 23.2 ms with limits of 1024, 4096 and
# 8192 (one H200, four layers); those of a ViT-L in `activations8` 9.54 and 9.37 with 1024 and 8192, of a DiT-XL 8.77 and 8.45.
MAX_ROW = 4096  # values


@final
class RowsInRegisters(InductorChoices):
    """A replacement for Inductor's choices of kernels that lets kernels hold longer rows in registers."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Return whether a kernel holds the whole row that it reduces in registers."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if not config.triton.persistent_reductions:
            return False
        is_row = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
        return is_row and V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_ROW)
