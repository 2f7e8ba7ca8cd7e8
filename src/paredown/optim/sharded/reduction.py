"""`reduce_in_8_bits` makes processes send gradients as codes and scales, and sum them in float32.

For a buffer of n values on W processes, process r owns the values of chunk r, ceil(n / W) of them:

    1  each process quantizes its W chunks                             codes and scales, rounded stochastically
    2  all-to-all: chunk r of every process goes to process r          (W - 1) chunks of codes and scales sent by each process
    3  process r decodes W chunks and adds them in float32
    4  fully_shard: done, chunk r is the result of process r
       DistributedDataParallel: process r quantizes the sum, and an all-gather gives it to all; all decode the same codes

Random bits follow from the seed, the number of reductions so far, the buffer, the process and the index in the whole buffer, so that a
run can be repeated, and replicas stay equal. A value that is not finite makes its block of 64 NaN in all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paredown.codec.packed import PackedTensor, encode
from paredown.errors import FormatError, OptimError
from paredown.formats.catalog import find_format
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed
from paredown.optim.sharded.packed_shards import managed_parameters

DEFAULT = "int8/64@bf16"
SUM_IDS = 1 << 20  # offset of the tensor ids of sums, which are quantized a second time
NO_MODEL = (
    "reduce_in_8_bits takes a model under DistributedDataParallel or fully_shard, and {} is neither: wrap it first. A model in one process "
    "has nothing to reduce."
)
NO_SHARDS = (
    "each process has all rows of this model, so fully_shard reduces its gradients over replicas only, in their dtype: leave "
    "reduce_in_8_bits out, shard over several processes, or use DistributedDataParallel."
)
NO_HOOK = "this torch ({}) has no FSDPModule.set_custom_reduce_scatter: update torch, or leave reduce_in_8_bits out."


def reduce_in_8_bits(model: nn.Module, *, format: Format | str = DEFAULT, seed: int = 0) -> Reduction:
    """Make the processes that train `model` exchange gradients as codes of `format`, and return the reduction.

    Gradients are summed in float32. All processes must call it, before the first step. `model` must be under DistributedDataParallel or
    fully_shard; with fully_shard over replicas of shards, the reduction over replicas stays in the gradients' dtype. `state_dict()` of the
    result belongs in a checkpoint.
    """
    reduction = Reduction(_checked(format), seed)
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        # torch refuses annotations as text
        model.register_comm_hook(None, lambda state, bucket: reduce_bucket(reduction, group, bucket))
        return reduction
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    if not modules:
        raise OptimError(NO_MODEL.format(type(model).__name__))
    if all(one.mesh_info.mesh.size(-1) == 1 for one in managed_parameters(model)):
        raise OptimError(NO_SHARDS)
    for i, module in enumerate(modules):
        if not hasattr(module, "set_custom_reduce_scatter"):
            raise OptimError(NO_HOOK.format(torch.__version__))
        module.set_custom_reduce_scatter(ReduceScatter(reduction, i))
    return reduction


def _checked(format: Format | str) -> Format:
    try:
        found = find_format(format)
    except FormatError as error:
        raise OptimError(f"format={format!r}: {error}") from None
    if found.block is None or found.has_tensor_scale:
        raise OptimError(f"format={found}: gradients have no fixed range, so give a format with block scales, such as '{DEFAULT}'.")
    return found


class Reduction:
    """The exchange of gradients between processes in a low-bit format, with the seed and counts that select random bits."""

    def __init__(self, format: Format, seed: int) -> None:
        self.format, self.seed = format, seed
        self.counts: dict[int, int] = {}  # buffer -> number of its reductions so far

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the counts of reductions, with which a resumed training draws the same random bits."""
        return {"seed": self.seed, "counts": {str(buffer): count for buffer, count in self.counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the seed and the counts of reductions from the result of `state_dict()`."""
        self.seed, self.counts = int(state["seed"]), {int(buffer): int(count) for buffer, count in state["counts"].items()}

    def begin(self, buffer: int) -> int:
        """Count one more reduction of gradient buffer number `buffer`, and return how many there were; the first is 1."""
        self.counts[buffer] = self.counts.get(buffer, 0) + 1
        return self.counts[buffer]

    def own_chunk(self, chunks: Tensor, buffer: int, group: Any) -> Tensor:
        """Return the float32 sum, over all processes, of the chunk of gradients for which this process is responsible.

        `chunks`: this process's gradients, (processes, values in a chunk); row r is summed by process r of `group`.
        """
        count, rank = self.begin(buffer), dist.get_rank(group)
        seed = Seed(self.seed, buffer * len(chunks) + rank, count)
        packed = encode(chunks.contiguous(), self.format, rounding=Rounding.STOCHASTIC, seed=seed, order="logical")
        received = packed.parts.mapped(lambda part: _exchanged(part, group))
        total = torch.zeros(chunks.shape[1], dtype=torch.float32, device=chunks.device)
        for row in range(len(chunks)):  # one by one: a chunk in float32 is four times as large as its codes
            parts = received.mapped(lambda part, row=row: part[row : row + 1])
            total += PackedTensor(self.format, torch.Size((1, len(total))), torch.float32, packed.order, parts).decode()[0]
        return total

    def for_all(self, chunk: Tensor, buffer: int, group: Any) -> Tensor:
        """Send the summed chunk of this process to all others, and return the chunks of all, (processes, values).

        Chunks are sent as codes, and every process decodes the same codes.
        """
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        seed = Seed(self.seed, SUM_IDS + buffer, self.counts[buffer], first_index=rank * chunk.numel())
        packed = encode(chunk[None], self.format, rounding=Rounding.STOCHASTIC, seed=seed, order="logical")
        gathered = packed.parts.mapped(lambda part: _gathered(part, size, group))
        return PackedTensor(self.format, torch.Size((size, chunk.numel())), torch.float32, packed.order, gathered).decode()


def _exchanged(rows: Tensor, group: Any) -> Tensor:
    """Send row r of `rows` to process r of `group`, and return the rows that all processes have sent to this one."""
    data = rows.contiguous().view(torch.uint8)
    received = torch.empty_like(data)
    dist.all_to_all_single(received, data, group=group)
    return received.view(rows.dtype)


def _gathered(row: Tensor, size: int, group: Any) -> Tensor:
    data = row.contiguous().view(torch.uint8)
    received = data.new_empty((size, *data.shape[1:]))
    dist.all_gather(list(received.split(1)), data, group=group)
    return received.view(row.dtype)


def reduce_bucket(reduction: Reduction, group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Replace the gradients in a bucket of DistributedDataParallel by their means over processes; return a finished future."""
    values = bucket.buffer()
    size = dist.get_world_size(group)
    with torch.no_grad():
        chunk = reduction.own_chunk(_chunks(values, size), bucket.index(), group).div_(size)
        values.copy_(reduction.for_all(chunk, bucket.index(), group).view(-1)[: values.numel()])
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(values)
    return done


def _chunks(values: Tensor, size: int) -> Tensor:
    """Return a copy of `values` as `size` rows of equal length, padded with zeros."""
    chunks = torch.zeros((size, -(-values.numel() // size)), dtype=values.dtype, device=values.device)
    chunks.view(-1)[: values.numel()] = values
    return chunks


class ReduceScatter:
    """The object that makes FSDP2 sum one module's gradients in 8 bits, for FSDPModule.set_custom_reduce_scatter."""

    def __init__(self, reduction: Reduction, buffer: int) -> None:
        self._reduction, self._buffer = reduction, buffer

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory in which FSDP2 puts gradients before or after the reduce-scatter."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        """Write this process's chunk of gradients, summed or averaged over all processes, into `output_tensor`."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise OptimError(f"reduce_in_8_bits computes sums and means, not {op}: leave set_gradient_divide_factor out.")
        size = dist.get_world_size(group)
        with torch.no_grad():
            total = self._reduction.own_chunk(input_tensor.view(size, -1), self._buffer, group)
            output_tensor.copy_(total.div_(size) if op == dist.ReduceOp.AVG else total)
