"""Workspaces of CUDA operations: against allocator snapshots of one H200, in traces, and on a GPU if there is one."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from paredown import Trace, footprint, trace_step
from paredown.plan.checkpointed_trace import checkpointed_trace
from paredown.predict.fake.device_ops import PROCESSORS, THREADS, sum_workspace, transposed_bytes

MEASURED = (  # rows, columns, bytes: blocks of gpu_reduce_kernel in memory snapshots on one H200, torch 2.11
    (16384, 1024, 134217728),
    (25216, 3072, 138412032),
    (49920, 256, 102236160),
)


class Wide(nn.Module):
    """Its peak is where the gradient of the bias is summed."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 1024, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def mean(x: Tensor, *_: Any) -> Tensor:
    return x.mean()


def traced(model: nn.Module, x: Tensor, device: str = "cuda", **more: Any) -> Trace:
    return trace_step(model, (x, x), loss=mean, device=device, **more)


@pytest.mark.parametrize(("rows", "columns", "nbytes"), MEASURED)
def test_partial_sums_are_those_of_a_gpu(rows: int, columns: int, nbytes: int) -> None:
    assert sum_workspace(rows, columns) == nbytes


@pytest.mark.parametrize(("rows", "columns"), [(1, 1024), (512, 1024), (1000, 3), (4, 100_000), (2048, 1 << 20)])
def test_few_rows_or_many_columns_need_none(rows: int, columns: int) -> None:
    """Fewer than 256 values a thread, or columns that alone fill the GPU."""
    assert sum_workspace(rows, columns) == 0


def test_large_tensors_are_summed_in_halves_and_float64_takes_twice_as_much() -> None:
    """Above 2 GiB the workspace is that of one half: the halves are summed one after the other."""
    assert sum_workspace(131072, 16384, torch.bfloat16) == sum_workspace(32768, 16384, torch.bfloat16)
    assert sum_workspace(16384, 1024, torch.float64) == sum_workspace(16384, 1024, torch.int32) == 2 * MEASURED[0][2]


@pytest.mark.parametrize("dims", [(), (0,), (-1,), (0, 1), (1,)])
def test_other_sums_need_no_workspace(dims: tuple[int, ...]) -> None:
    """Sums over all dimensions, along rows, and of a scalar: traced, without workspace."""

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean().sum(0) if dims == (0,) else x.sum(dims)

    x = torch.empty(16384, 1024, requires_grad=True)
    assert not [output for output in traced(Sum(), x).outputs if output.dtype == "uint8"]


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_gradient_of_a_bias_needs_workspace_on_cuda_only(has_bias: bool) -> None:
    x = torch.empty(4, 4096, 64)
    for device in ("cuda", "cpu"):
        sums = [
            output.nbytes for output in traced(Wide(has_bias), x, device).outputs if output.op == "sum" and output.dtype == "uint8"
        ]
        assert sums == ([MEASURED[0][2]] if has_bias and device == "cuda" else [])


def test_the_workspace_lives_while_the_sum_runs() -> None:
    trace = traced(Wide(), torch.empty(4, 4096, 64))
    workspace = next(output for output in trace.outputs if output.dtype == "uint8")
    assert workspace.birth == workspace.death > trace.backward_at
    assert footprint(trace).peak_bytes > footprint(traced(Wide(False), torch.empty(4, 4096, 64))).peak_bytes + workspace.nbytes // 2


def test_float32_attention_sums_gradients_of_queries_in_blocks() -> None:
    """100761600 bytes for 768 x 4 heads of 65 positions and 16 values, measured on one H200: two blocks of 64 x 64 and a lock each."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x)

    x = torch.empty(768, 4, 65, 16, requires_grad=True)
    assert 100761600 in [output.nbytes for output in traced(Attention(), x).outputs if output.phase == "backward"]


def test_recomputed_tensors_are_freed_before_gradients_are_summed() -> None:
    """The input of the second layer is freed before the gradient of the bias is summed; in the baseline it is not."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024)))
    trace = traced(model, torch.empty(4, 4096, 64))
    workspace = next(
        output for output in trace.outputs if output.op == "sum" and output.dtype == "uint8" and output.module == "0.2"
    )
    slot = next(slot for slot in trace.activations if slot.name == "0.2:input")
    assert slot.death >= workspace.birth
    again = next(slot for slot in checkpointed_trace(trace, ("0",)).activations if slot.name == "0.2:input")
    assert trace.backward_at < again.birth <= again.death < workspace.birth


class Residual(nn.Module):
    """The variable `x` holds the first sum until the last layer is done, and no layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(64, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        x = self.layers(torch.cat([x, x + 1.0], dim=1))
        return x


def test_a_tensor_that_only_a_variable_holds_is_no_input_of_a_layer() -> None:
    trace = traced(Residual(), torch.empty(8, 128, 64), "cpu")
    held = next(output for output in trace.outputs if output.op == "addmm" and output.module == "start")
    assert held.death > held.used, "the program holds it"
    again = checkpointed_trace(trace, ("layers.*",))
    same_outputs = [output for output in again.outputs if output.op == "addmm" and output.module == "start"]
    assert [output.death for output in same_outputs] == [held.death]


# --- convolutions ------------------------------------------------------------------------------------------------------


def convolution_workspaces(conv: nn.Module, x: Tensor) -> list[tuple[str, int]]:
    """(phase, MiB) of every workspace in a traced step under bf16 autocast."""
    trace = traced(nn.Sequential(conv), x.requires_grad_(), autocast=torch.bfloat16)
    return [(output.phase, output.nbytes >> 20) for output in trace.outputs if "conv" in output.op and output.dtype == "uint8"]


def test_convolutions_copy_operands_that_are_not_channels_last() -> None:
    """Input and output in forward, the output's gradient and the input in backward; three channels take 16 bytes a pixel."""
    x = torch.empty(32, 192, 64, 64)
    assert convolution_workspaces(nn.Conv2d(192, 64, 3, padding=1), x) == [("forward", 48 + 16), ("backward", 16 + 48)]
    assert convolution_workspaces(nn.Conv2d(192, 3, 1), x) == [("forward", 48 + 2), ("backward", 2 + 48)]
    assert convolution_workspaces(nn.Conv1d(64, 64, 3, padding=1), torch.empty(32, 64, 4096)) == [("forward", 32), ("backward", 32)]
    volumes = torch.empty(2, 64, 32, 64, 64)
    assert convolution_workspaces(nn.Conv3d(64, 32, 3, padding=1), volumes) == [("forward", 48), ("backward", 48)]


def test_what_is_channels_last_is_not_copied() -> None:
    """The layout of the weight or the input is that of the output. The gradient of the mean is not channels_last, and is copied."""
    last, x, conv = torch.channels_last, torch.empty(32, 64, 64, 64), partial(nn.Conv2d, 64, 64, 3, padding=1)
    assert convolution_workspaces(conv().to(memory_format=last), x.to(memory_format=last)) == [("backward", 16)]
    assert convolution_workspaces(conv().to(memory_format=last), x.clone()) == [("forward", 16), ("backward", 32)]
    assert convolution_workspaces(conv(groups=64), x.clone()) == [], "depthwise: a kernel of torch's own"


@pytest.mark.gpu
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(192, 64), (64, 128)])
def test_workspace_of_convolutions_is_that_of_a_gpu(num_in: int, num_out: int, is_last: bool) -> None:
    """In bf16, within 8 MiB of the peak of a forward pass."""
    gc.collect()
    layout = torch.channels_last if is_last else torch.contiguous_format
    conv = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False).to("cuda", torch.bfloat16, memory_format=layout)
    x = torch.randn(32, num_in, 64, 64, device="cuda", dtype=torch.bfloat16).to(memory_format=layout)
    with torch.no_grad():
        out = conv(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        again = conv(x)
    taken = torch.cuda.max_memory_allocated() - before - again.nbytes
    assert taken == pytest.approx(transposed_bytes(x, out), abs=8 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1500, 64), (5000, 96), (16384, 1024), (25216, 3072), (9000, 10), (300_000, 7)])
def test_workspace_is_that_of_a_gpu(rows: int, columns: int, dtype: torch.dtype) -> None:
    properties = torch.cuda.get_device_properties(0)
    if (properties.multi_processor_count, properties.max_threads_per_multi_processor) != (PROCESSORS, THREADS):
        pytest.skip(f"the arithmetic is for {PROCESSORS} processors, here are {properties.multi_processor_count}")
    gc.collect()  # what earlier tests hold is freed before, not while it is measured
    x = torch.ones(rows, columns, dtype=dtype, device="cuda")
    x.sum(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x.sum(0)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken == pytest.approx(sum_workspace(rows, columns), abs=64 * 1024), "with the result and counters of blocks"
