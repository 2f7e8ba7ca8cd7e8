"""Whether the operands of an attention may be packed: a bound on what rounding them does to the probabilities.

Backward computes P = exp(scale q.k - logsumexp) with the decoded q and k and the exact logsumexp of the forward pass. The logits are off
by about

    error = sqrt(2) * e * scale * max|q| * max|k| / sqrt(d)

with e the relative error of the format (int8: 0.6 %), |.| the norm of a row and d its length: probabilities are off by exp(error), and
gradients with them, without bound as logits grow. Where logits are large, probabilities are 0 or 1, and the gradient of a logit is the
small difference of v times the gradient and its sum over the output: rounding v hides it. Above LARGEST_ERROR q, k and v stay plain, and
`session.changes` has the number.

On a CPU the norms are read in every forward pass. On a GPU reading them would wait for the device: that happens once for each attention,
when it is saved first; after that the norms of every EVERY-th forward pass are copied to the host in the background, and decide about the
passes that follow.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from paredown.formats.format import Format
from paredown.plan.given import significant_bits
from paredown.plan.graph import Saved

LARGEST_ERROR = 0.1  # of a logit, as a standard deviation: probabilities 10 % off
OF_ONE_STEP = 0.75  # relative error of rounding, in units of 2^-bits: 0.6 % for int8, measured on normal values in blocks of 64
EVERY = 8


@dataclass(eq=False, slots=True)
class Seen:
    """What is known of one attention: the bound on its logits, in which forward pass, and a later one on its way to the host."""

    bound: float
    forwards: int
    coming: Tensor | None = None
    arrived: Any = None  # the CUDA event after the copy


class LogitBounds:
    """The bounds of all attentions of a model, by the module and operation that saved them."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def reason_to_keep(self, saved: Saved, format: Format, forwards: int) -> str:
        """Why a query, key or value stays plain under `format` in this forward pass; "" if it may be packed."""
        assert saved.tensor is not None
        bound = self._bound(saved.name.rpartition(".")[0], saved.node, saved.tensor.is_cuda, forwards)
        error = sqrt(2 / saved.tensor.shape[-1]) * OF_ONE_STEP * 2.0 ** -significant_bits(format) * bound
        if error <= LARGEST_ERROR:
            return ""
        return f"its logits are up to {bound:.3g}: in {format} they would be off by about {error:.2g}, and probabilities by exp of that"

    def _bound(self, name: str, node: Any, is_cuda: bool, forwards: int) -> float:
        seen = self._seen.get(name)
        if seen is None or (not is_cuda and seen.forwards != forwards):
            seen = self._seen[name] = Seen(largest_logit(node).item(), forwards)
        elif is_cuda and seen.forwards != forwards:
            _update(seen, node, forwards)
        return seen.bound


def largest_logit(node: Any) -> Tensor:
    """scale * max|q| * max|k|, which no logit exceeds (Cauchy-Schwarz); infinity where it is not a number."""
    query, key, scale = node._saved_query, node._saved_key, node._saved_scale
    rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).max() for t in (query, key)]
    return (rows[0] * rows[1] * (query.shape[-1] ** -0.5 if scale is None else scale)).abs().nan_to_num(nan=inf)


def _update(seen: Seen, node: Any, forwards: int) -> None:
    """Take over what has arrived on the host; send the next one on its way."""
    seen.forwards = forwards
    if seen.coming is not None and seen.arrived.query():
        seen.bound, seen.coming = float(seen.coming), None
    if seen.coming is None and forwards % EVERY == 0 and not torch.cuda.is_current_stream_capturing():
        seen.coming = torch.empty((), pin_memory=True).copy_(largest_logit(node), non_blocking=True)
        seen.arrived = torch.cuda.current_stream().record_event()
