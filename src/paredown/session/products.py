"""TF32 where it is exact: a product of two tensors with at most 10 mantissa bits each loses nothing by it, and is several times faster.

Accumulation is float32 either way. Only CUDA has TF32; elsewhere nothing is done.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from paredown.codec.live import is_narrow
from paredown.session.places import Place

# Not allow_tf32, which cannot be read once the user has set these; it reads as before when they are put back
SWITCHES: tuple[Any, ...] = (torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn).conv)


def are_narrow(places: Iterable[Place | None]) -> bool:
    """Whether all of these are, also once they are raised."""
    return all(
        p is not None and is_narrow(p.assignment.format) and (p.raised.format is None or is_narrow(p.raised.format)) for p in places
    )


class Precision:
    """Torch's switches of TF32 during a product; `restore` puts them back."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] | None = None

    def set(self, is_narrow: bool) -> None:
        """TF32 or not, for what is launched from now on."""
        if self._before is None:
            self._before = tuple(switch.fp32_precision for switch in SWITCHES)
        for switch in SWITCHES:
            switch.fp32_precision = "tf32" if is_narrow else "ieee"

    def restore(self) -> None:
        """As it was."""
        for switch, before in zip(SWITCHES, self._before or (), strict=False):
            switch.fp32_precision = before
        self._before = None

    def around(self, node: Any, is_narrow: bool) -> None:
        """The same in backward, while `node` runs."""
        node.register_prehook(_call(lambda: self.set(is_narrow)))
        node.register_hook(_call(self.restore))


def _call(function: Callable[[], None]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        function()

    return hook
