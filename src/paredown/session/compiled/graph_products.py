"""Products of 8-bit codes in the graphs of torch.compile: `F.linear` of the chosen layers becomes `row_linear` (codec/products.py).

The graph that Dynamo makes is edited, before autograd is traced: so forward, backward and evaluation multiply codes alike. The casts are
plain torch in the joint graph, where equal ones become one (q, k and v read the same codes), and Inductor fuses them into norms and
activations. What the partitioner saves for backward follows the plan as everything else: where the input of a norm is saved anyway,
backward makes the codes again from it, with the scales of forward.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from paredown.codec import backend
from paredown.codec.products import TRANSPOSED, row_linear
from paredown.loss.graph_head import LINEARS
from paredown.session.compiled.graph_slots import aten_name
from paredown.session.eager.product_layers import ProductLayers

DEVICES = ("cuda", "cpu")  # where an operation transposes
ORDER, AS_DTYPE = torch.ops.aten.permute.default, torch.ops.aten.view.dtype


def rewrite_products(gm: fx.GraphModule, inputs: Sequence[Any], layers: ProductLayers, names: Mapping[int, str]) -> None:
    """Replace `F.linear` in a graph of Dynamo by products of 8-bit codes, for the layers that `layers` has chosen.

    `inputs`: example inputs of the graph. `names`: names of parameters by id.
    """
    examples = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
    found = layers.in_graphs = layers.in_graphs or set[str]()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in LINEARS or node.kwargs:
            continue
        operands: tuple[Any, ...] = (*node.args, None)
        x, weight, bias = operands[:3]
        path = names.get(id(examples.get(weight)), "").removesuffix(".weight")
        if path not in layers.elements:
            continue
        if reason := layers.reason_at_call(path, x.meta["example_value"], examples[weight]):
            layers.left[path] = layers.elements[path], reason
        else:
            node.target, node.args = row_linear, (x, weight, bias, layers.elements[path])
            found.add(path)
    gm.recompile()


def is_transpose(node: Any) -> bool:
    """Return whether a node transposes a matrix of 8-bit codes."""
    return isinstance(node, fx.Node) and node.op == "call_function" and aten_name(node) == TRANSPOSED


def _devices() -> tuple[str, ...]:
    """Return the device types with an operation to transpose 8-bit codes: the CPU, and CUDA if it has kernels."""
    return DEVICES if backend.find_kernels() is not None else tuple(device for device in DEVICES if device != "cuda")


def _transpose(graph: fx.Graph, chain: Sequence[fx.Node]) -> fx.Node:
    """Insert one transpose that replaces a chain of operations (the last one first) into the graph, and return its node.

    Forward may have saved a view from the middle of the chain, so that the first tensor has another order and dtype.
    """
    source, last = chain[-1].args[0], chain[0].meta["val"]
    assert isinstance(source, fx.Node)
    if not any(node.target is ORDER for node in chain):
        codes, source = source.meta["val"], graph.call_function(ORDER, (source, [1, 0]))
        source.meta["val"] = codes.t()
    if source.meta["val"].dtype is not last.dtype:
        codes, source = source.meta["val"], graph.call_function(AS_DTYPE, (source, last.dtype))
        source.meta["val"] = codes.view(last.dtype)
    call = graph.call_function(torch.ops.paredown.transposed_codes.default, (source,))
    call.meta = dict(chain[0].meta)
    return call


def finish_products(backward: fx.GraphModule) -> None:
    """Insert operations that Inductor does not fuse into backward: transposes of codes, and a shared tensor of ones.

    Graphs are partitioned before that, since the partitioner would save the result of an operation that it does not know.
    """
    call_transposes(backward.graph)
    share_ones(backward.graph)
    backward.recompile()


def call_transposes(graph: fx.Graph) -> None:
    """Make each transpose of 8-bit codes in a backward graph one operation, which Inductor does not fuse.

    On CUDA Inductor would fuse transposes into reductions; the operation is a kernel of its own. On a CPU it would fuse them with the
    decoding of a packed input, and fail where tokens and inputs differ in number (`try_loop_split` of torch 2.13, an AssertionError).
    """
    for node in list(graph.nodes):
        is_last = is_transpose(node) and not any(is_transpose(user) for user in node.users)
        if not is_last or node.meta["val"].device.type not in _devices():
            continue
        chain = [node]
        while is_transpose(chain[-1].args[0]):
            chain.append(chain[-1].args[0])
        with graph.inserting_before(node):
            call = _transpose(graph, chain)
        node.replace_all_uses_with(call)
        for one in chain:
            if not one.users:
                graph.erase_node(one)


def share_ones(graph: fx.Graph) -> None:
    """Make all products of a graph read the same tensor of ones as the scales that their second operand lacks.

    A tensor of one number has no memory until Inductor writes it, which it would do for each product: 7 launches for each layer.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        products = [user for user in node.users if user.target is torch.ops.aten._scaled_mm.default]
        if len(products) > 1:
            with graph.inserting_after(node):
                ones = graph.call_function(torch.ops.paredown.in_memory.default, (node,))
            ones.meta = dict(node.meta)
            for product in products:
                product.replace_input_with(node, ones)
