"""`GraphMemory`: which values of small graphs take memory, and when. What is expected follows from Inductor's rules by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paredown.predict.graph_memory import GraphMemory

SIDE = 64
NBYTES = SIDE * SIDE * 4


def memory_of(function: Callable[..., Any], num_inputs: int = 2, size: tuple[int, ...] = (SIDE, SIDE)) -> GraphMemory:
    """The memory of `function` of float32 tensors of `size`."""
    with FakeTensorMode():
        inputs = [torch.empty(size) for _ in range(num_inputs)]
        return GraphMemory(make_fx(function, decomposition_table=select_decomp_table())(*inputs).graph)


def allocated(memory: GraphMemory) -> list[str]:
    """The operations whose results take memory, in the order of the graph."""
    return [str(buffer.node.target).split(".")[1] for buffer in memory.buffers]


def peak(memory: GraphMemory) -> int:
    """The most tensors of NBYTES at a time; outputs exist until the end."""
    end = memory.num_kernels
    spans = [(buffer.birth, end if buffer.is_output else buffer.death, buffer.nbytes) for buffer in memory.buffers]
    return max(sum(nbytes for birth, death, nbytes in spans if birth <= time <= death) for time in range(end)) // NBYTES


def test_pointwise_operations_are_one_kernel() -> None:
    memory = memory_of(lambda x, y: ((x + y).sin() * 2).exp())
    assert allocated(memory) == ["exp"] and memory.num_kernels == 1


def test_products_read_and_write_memory() -> None:
    memory = memory_of(lambda x, y: ((x.sin() @ y).cos() @ y).exp())
    assert allocated(memory) == ["sin", "mm", "cos", "mm", "exp"]
    assert memory.num_kernels == 5


def test_a_value_for_a_product_and_an_output_is_written_once() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        h = x.sin()
        return h @ y, h * 2

    assert allocated(memory_of(function)) == ["sin", "mm", "mul"]


def test_a_cheap_value_is_read_again_from_its_inputs() -> None:
    """h is inlined in both kernels: it is not written between them, and x is read at the end."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        h = x + 1
        return h + (h.sum(1, keepdim=True) + y @ y)

    memory = memory_of(function)
    assert "add" not in [name for name, buffer in zip(allocated(memory), memory.buffers, strict=True) if not buffer.is_output]


def test_a_norm_over_rows_is_one_kernel() -> None:
    memory = memory_of(lambda x: torch.nn.functional.layer_norm(x.sin(), (SIDE,)), 1)
    assert memory.num_kernels == 1 and sum(buffer.nbytes for buffer in memory.buffers) == NBYTES


def test_a_sum_over_columns_ends_a_kernel() -> None:
    memory = memory_of(lambda x: x.sin() - x.sin().sum(0), 1)
    assert memory.num_kernels == 2


def test_views_share_memory() -> None:
    memory = memory_of(lambda x, y: (x @ y).t().reshape(-1).view(SIDE, SIDE) @ y)
    assert allocated(memory).count("mm") == 2 and "t" not in allocated(memory) and "view" not in allocated(memory)


def test_a_kernel_writes_over_what_it_reads_last() -> None:
    once = memory_of(lambda x, y: (x @ y).sin() @ y)
    assert peak(once) == 2  # the product becomes its sine in place; then the second product

    def twice(x: Tensor, y: Tensor) -> Tensor:
        h = x @ y
        return (h.sin() @ y) @ h

    assert peak(memory_of(twice)) == 3


def test_copies_of_one_tensor_are_one_kernel() -> None:
    """Both are written at once, by a kernel that reads x once."""

    def function(x: Tensor, y: Tensor) -> Any:
        return x.sin() @ y, x.cos() @ y

    memory = memory_of(function)
    births = [buffer.birth for buffer in memory.buffers if buffer.kind == "pointwise"]
    assert births == [0, 0] and peak(memory) == 3  # both copies and the first product; the sine is freed before the second


def test_kernels_that_are_far_apart_are_joined_if_one_reads_what_the_other_writes() -> None:
    """A cast of a product's operand for backward stands at the end of a graph: it is written with the operand, which is then freed."""

    def chain(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(70):
            x = x @ y
        return x

    def cast_of_operand(x: Tensor, y: Tensor) -> Any:
        operand = x.sin()
        return chain(operand, y), operand.cos()

    def cast_of_input(x: Tensor, y: Tensor) -> Any:
        return chain(x.sin(), y), x.cos()

    births = [memory_of(function).buffers[-1].birth for function in (cast_of_operand, cast_of_input)]
    assert births == [0, 71]


def test_kernels_of_packed_backward_graphs_are_in_the_order_of_their_last_operations() -> None:
    """The sine and the last sum are one kernel, which needs a chain of products: by first operations, `side` comes after it."""

    def function(x: Tensor, y: Tensor) -> Any:
        h = x @ y
        sine, side = h.sin(), h @ x
        return sine, side, (h @ y @ y) + h

    with FakeTensorMode():
        graph = make_fx(function)(torch.empty(SIDE, SIDE), torch.empty(SIDE, SIDE)).graph
    order = {
        by_last: [b.birth for b in GraphMemory(graph, by_last=by_last).buffers if b.kind == "extern"] for by_last in (False, True)
    }
    assert order == {False: [0, 4, 1, 2], True: [0, 1, 2, 3]}


def test_a_value_with_many_inputs_and_readers_is_written() -> None:
    def function(*inputs: Tensor) -> Any:
        h = sum(inputs[1:], start=inputs[0])
        return h * ((h + 1) @ inputs[0])

    few, many = memory_of(function, 3), memory_of(function, 6)
    written = [sum(buffer.kind == "pointwise" for buffer in memory.buffers) for memory in (few, many)]
    assert written == [2, 3]


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_inputs_are_read(num_inputs: int) -> None:
    memory = memory_of(lambda *inputs: sum(x.sin() for x in inputs), num_inputs)
    placeholders = [node for node in memory.order if node.op == "placeholder"]
    assert [memory.reads(node) for node in placeholders] == [[0]] * num_inputs


def test_comparisons_are_no_reads_of_values() -> None:
    """A product reads x in the first kernel; the last kernel compares x with 0, which a session does in forward."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        h = (x @ y) @ y
        return torch.where(x > 0, h, 0.0)

    memory = memory_of(function)
    x = next(iter(memory.order))
    assert (memory.reads(x), memory.value_reads(x)) == ([0, 2], [0])


SIZE = (8, 128, 16, 16)
NUM_BYTES = 2 * 8 * 128 * 16 * 16  # of a picture's activations in bf16


def convolved(num_out: int, *, is_last: bool = False, on_cuda: bool = True, groups: int = 1) -> list[int]:
    """The buffers of a 3 x 3 convolution in bf16."""
    layout = torch.channels_last if is_last else torch.contiguous_format
    with FakeTensorMode():
        x, weight = torch.empty(SIZE, dtype=torch.bfloat16), torch.empty(num_out, 128 // groups, 3, 3, dtype=torch.bfloat16)
        inputs = [tensor.to(memory_format=layout) for tensor in (x, weight)]
        traced = make_fx(lambda x, w: torch.conv2d(x, w, padding=1, groups=groups))(*inputs)
        return sorted(buffer.nbytes for buffer in GraphMemory(traced.graph, on_cuda=on_cuda).buffers)


def test_cudnn_transposes_what_is_not_channels_last() -> None:
    """Copies of input and output beside the output; not where Inductor makes the convolution channels_last itself (128 to 128)."""
    half = NUM_BYTES // 2
    assert convolved(64) == [half, NUM_BYTES + half]
    assert convolved(64, is_last=True) == convolved(64, on_cuda=False) == [half]
    assert convolved(128) == [NUM_BYTES]
    assert convolved(128, groups=2) == [NUM_BYTES, 2 * NUM_BYTES], "Inductor leaves grouped convolutions unmodified"


def test_cudnn_transposes_volumes() -> None:
    """Inductor leaves them unmodified, whatever their channels: forward copies input and output, each of two gradients two operands."""

    def buffers(mask: list[bool] | None) -> list[int]:
        with FakeTensorMode():
            x, weight = torch.empty(2, 128, 8, 8, 8, dtype=torch.bfloat16), torch.empty(256, 128, 1, 1, 1, dtype=torch.bfloat16)
            gradient = torch.empty(2, 256, 8, 8, 8, dtype=torch.bfloat16)
            options = ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)

            def function(gradient: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
                if mask is None:
                    return [torch.ops.aten.convolution(x, weight, None, *options)]
                found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *options, mask)
                return [part for part in found if part is not None]

            traced = make_fx(function)(gradient, x, weight)
        memory = GraphMemory(traced.graph, on_cuda=True)
        assert len(memory.workspaces()) == 1
        return sorted(buffer.nbytes for buffer in memory.buffers)

    x = 2 * 2 * 128 * 8**3  # bytes
    assert buffers(None) == [2 * x, 3 * x]
    assert buffers([True, False, False]) == [x, 3 * x]
    assert buffers([False, True, False]) == [2 * 128 * 256, 3 * x]
