"""Finds what an operation of a compiled graph is to Inductor (view, pointwise, ...), and how many flops it takes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names("""
    view _unsafe_view permute transpose t slice select expand unsqueeze squeeze alias detach as_strided split split_with_sizes unbind
    diagonal reshape view_as_real view_as_complex getitem
""")
REDUCTIONS = _names("""
    sum mean amax amin var_mean var prod any all argmax argmin logsumexp max min prepare_softmax_online xor_sum std linalg_vector_norm
    norm count_nonzero
""")
SCATTERS = _names("""
    index_put _unsafe_index_put _unsafe_masked_index_put_accumulate scatter scatter_add scatter_reduce embedding_dense_backward
    index_add cumsum cumprod
""")
POINTWISE = _names("""
    convert_element_type full iota where clone index _unsafe_index gather embedding cat constant_pad_nd copy empty empty_strided
    scalar_tensor arange fill rev inductor_seeds inductor_seed inductor_lookup_seed inductor_random inductor_randint full_like
    zeros_like ones_like empty_like broadcast_in_dim slice_scatter select_scatter as_strided_scatter avg_pool2d avg_pool2d_backward
    _low_memory_max_pool_offsets_to_indices max_pool2d_with_indices_backward _unsafe_masked_index repeat flip roll _to_copy copy_
    bernoulli masked_fill device_put decode unpack_bits
""")


def kind_of(node: fx.Node) -> str:
    """Return Inductor's kind of an operation in a compiled graph: "view", "extern", "reduction", "scatter" or "pointwise"."""
    name = name_of(node)
    if name in VIEWS:
        return "view"
    if name in REDUCTIONS:
        return "reduction"
    if name in SCATTERS:
        return "scatter"
    tags = getattr(node.target, "tags", ())
    return "pointwise" if name in POINTWISE or torch.Tag.pointwise in tags else "extern"


def name_of(node: fx.Node) -> str:
    """Return the name of the operation that a node calls, without namespace and overload, such as "add"."""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else str(node.target)


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read the value of `node`, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and kind_of(user) == "view":
            yield from readers_of(user)
        else:
            yield user


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating point operations of a call by torch's formula; 0 if torch has none for it."""
    formula = flop_registry.get(func._overloadpacket)
    try:
        return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
    except (AssertionError, IndexError, TypeError, ValueError):
        return 0
