"""Finds the slots of a compiled graph's saved tensors (their names in eager mode), and what backward needs of them.

torch.compile traces forward and backward into one joint graph of aten operations, then partitions it. Each node keeps `seq_nr`, the number
of the autograd operation that it belongs to (the same in forward and backward), `original_aten`, the operation before decomposition, and
the stack of modules that called it. So a node of backward that reads a saved tensor names the operation that saved it, and the row of that
operation in the table of operations (autograd/operations.py) states what backward needs: slots have the names and needs of eager mode.

    backward  mul(tangent, x)   original_aten native_layer_norm_backward, seq_nr 101, module h.0.ln_2   ->  h.0.ln_2:input, is_centered

The partitioner may let backward recompute operations of forward from what it saves. A saved tensor then has every slot that backward reads
behind it. Its error passes through the recomputed operations: those in PASSED keep it in proportion, others make the tensor EXACT.
Comparisons (the sign of a ReLU) are not recomputed: they are saved as exact bits (graph_editor.py).

A tensor that an unknown operation uses is stored unmodified, as in eager mode.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from paredown.autograd.operations import (
    NONLINEAR,
    PERIODIC,
    ROWS,
    STATISTIC,
    UNKNOWN,
    Needs,
    Operand,
    OperationRow,
    Pin,
    Use,
    row_of,
)
from paredown.codec.products import PRODUCT, QUANTIZE
from paredown.loss.loss_operator import NAME as LOSS_OPERATOR

NORMS = frozenset(("batch_norm", "layer_norm", "group_norm", "rms_norm"))
SMOOTH = frozenset((*NORMS, "gelu", "silu", "tanh", "sigmoid", "mish", "elu", "hardswish", "erf"))
ATTENTION = "scaled_dot_product_attention"
ROW_NAMES = {name.lower(): name for name in ROWS}
ALIASES: dict[str, str] = dict.fromkeys(
    ("nativebatchnormlegitfunctional", "nativebatchnormlegit", "nativebatchnormlegitnostats", "cudnnbatchnorm"), "NativeBatchNorm"
)
# aten operations whose result has errors in proportion to those of their inputs
PASSED = frozenset((
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze",
    "split", "split_with_sizes", "cat", "stack", "clone", "alias", "contiguous", "_to_copy", "to", "convert_element_type",
    "add", "sub", "rsub", "neg", "mul", "where", "relu", "threshold", "leaky_relu", "gelu", "silu", "native_layer_norm",
    "native_group_norm", "_fused_rms_norm", "native_batch_norm", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit", "cudnn_batch_norm", "native_dropout", "dropout", "tanh", "sigmoid", "sum", "mean",
    "avg_pool2d", "constant_pad_nd", "index", "gather", "detach", "unbind", "as_strided", "copy", "hardtanh", "clamp",
    "lift_fresh_copy", "full", "full_like", "zeros_like", "ones_like", "empty_like", "scalar_tensor", "arange",
    "broadcast_in_dim", QUANTIZE, PRODUCT,
))  # fmt: skip
PRODUCTS = frozenset(("mm", "bmm", "mul", "convolution_backward", PRODUCT))
WITH_OUTPUT = ("result", "output", "logsumexp", "log_sumexp")
UNKNOWN_OPERATION = "backward uses it in {}, of which nothing is known"
RECOMPUTED = "backward recomputes {} from it, which may enlarge its error"
PHASE = "backward takes the {} of it, which is off by as many radians"
_PATH = re.compile(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")


@dataclass(frozen=True)
class GraphSlot:
    """Describes a saved tensor of a compiled graph: its slot names in eager mode, and what backward needs of it.

    `reason`: why backward needs it exactly, "" if it does not.
    """

    names: tuple[str, ...]
    needs: Needs
    reason: str = ""
    numbers: tuple[int, ...] = ()  # of the operations that use its values, in the joint graph


@dataclass
class JointGraph:
    """Holds the model's operations that were found in a joint graph of forward and backward."""

    operations: dict[int, GraphOperation] = field(default_factory=dict)  # by seq_nr
    numbers: dict[str, int] = field(default_factory=dict)  # seq_nr of every node
    of_inputs: set[str] = field(default_factory=set)  # nodes that depend on the inputs of the model, not on its parameters alone


@dataclass
class GraphOperation:
    """Describes a model's operation in a joint graph: its row in the table of operations, its module and nodes."""

    aten: str
    row: OperationRow
    module: str
    is_leaf: bool
    nodes: list[fx.Node] = field(default_factory=list)
    count: int = 1  # 2 for the second operation of this name in its module

    def slot(self, operand: str) -> str:
        """Return the slot name of an operand, as in eager mode: module:operand, or module:operation.operand."""
        number = f"#{self.count}" if self.count > 1 else ""
        return f"{self.module}:{operand}" if self.is_leaf else f"{self.module}:{self.row.op}{number}.{operand}"


def read_joint_graph(
    graph: fx.Graph, parameters: Iterable[fx.Node], unique: Set[str], roots: Mapping[str, str] | None = None
) -> JointGraph:
    """Return the model's operations in a joint graph; `parameters` are its placeholders of parameters and buffers.

    `unique`: the names of the nodes that remain when the partitioner merges equal nodes; operations are given with these nodes. `roots`:
    paths in the model of the modules that are variables of the compiled function, such as {"self": "layers.3"}.
    """
    joint, constant = JointGraph(), set(parameters)
    counts: dict[tuple[str, str], int] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr", -1)
        joint.numbers[node.name] = number
        if node.op == "placeholder":
            joint.of_inputs |= set() if node in constant else {node.name}
            continue
        inputs = node.all_input_nodes
        if aten_name(node) == LOSS_OPERATOR:
            continue  # what it makes are a loss and gradients, no activations
        if not inputs or any(i.name in joint.of_inputs for i in inputs) or _is_random(node):
            joint.of_inputs.add(node.name)
        if is_backward(node) or node.op != "call_function":
            continue
        if number >= 0 and number not in joint.operations:  # later ones of the same number need no gradient
            joint.operations[number] = _operation(node, counts, roots or {})
        if number >= 0 and joint.operations[number].aten == aten_name(node):
            joint.operations[number].nodes.append(node)
    equal = _equal_nodes(graph, unique)
    for operation in joint.operations.values():
        operation.nodes = [equal[node] for node in operation.nodes]
    return joint


def _equal_nodes(graph: fx.Graph, unique: Set[str]) -> dict[fx.Node, fx.Node]:
    """Return, for each node, the node that replaces it when the partitioner merges equal operations.

    Nodes with a name in `unique` are not replaced.
    """
    found: dict[fx.Node, fx.Node] = {}
    first: dict[tuple[Any, str], fx.Node] = {}
    node: fx.Node
    for node in graph.nodes:
        key = node.target, repr(map_arg((node.args, node.kwargs), lambda n: found[n]))
        found[node] = node if node.name in unique else first.get(key, node)
        first.setdefault(key, found[node])
    return found


def is_backward(node: fx.Node) -> bool:
    """Return whether a node of a joint graph belongs to backward."""
    return node.meta.get("partitioner_tag") == "is_backward" or (
        node.meta.get("fwd_nn_module_stack") is not None and node.meta.get("partitioner_tag") is None
    )


def slot_of(saved: fx.Node, joint: JointGraph) -> GraphSlot:
    """Return a saved tensor's slot names and what backward needs of it, given its placeholder in backward."""
    uses = list(_uses(saved, joint))
    names = tuple(dict.fromkeys(name for _, name, _, _ in sorted(uses, key=lambda use: use[0])))
    exact = next((reason for _, _, needs, reason in uses if needs.use is Use.EXACT), "")
    if exact:
        return GraphSlot(names, Needs(Use.EXACT), exact)
    pins: list[Pin] = [needs.pin for _, _, needs, _ in uses if needs.pin is not None]
    pin = max(pins, key=lambda pin: pin.significant_bits, default=None)
    numbers = tuple(dict.fromkeys(number for number, *_ in uses))
    return GraphSlot(names, Needs(Use.VALUE, pin, any(needs.is_centered for _, _, needs, _ in uses)), numbers=numbers)


def num_recomputed_sums(graph: fx.Graph) -> int:
    """Return the length of the longest chain of additions that a backward graph recomputes."""
    depths: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not is_backward(node):
            inputs = [depths.get(i, 0) for i in node.all_input_nodes]
            is_sum = aten_name(node) == "add" and len(node.all_input_nodes) == 2
            depths[node] = max(inputs, default=0) + is_sum
    return max(depths.values(), default=0)


FoundUse = tuple[int, str, Needs, str]  # number of the operation, slot name, needs, reason of EXACT


def _uses(saved: fx.Node, joint: JointGraph) -> Iterator[FoundUse]:
    """Yield each use of a saved tensor in backward, also through operations of forward that backward recomputes."""
    stack, seen = [Reached(saved, saved, joint.numbers.get(saved.name, -1))], {saved}
    while stack:
        reached = stack.pop()
        for user in reached.value.users:
            if user.op == "output" or is_boolean(user):
                continue  # booleans are saved as exact bits
            number, aten = joint.numbers.get(user.name, -1), aten_name(user)
            entry = reached.entry if number == reached.number else reached.value
            if is_backward(user) and aten_name(entry) == QUANTIZE:  # codes that several layers multiply
                yield from _code_uses(entry, joint, is_centered=reached.is_centered)
            elif is_backward(user):
                yield from _use(entry, user, joint, reached.is_centered)
            elif (aten not in PASSED and not _is_power(user)) or (_is_integer(user) and aten != QUANTIZE):
                yield number, _name(joint.operations.get(number), aten), Needs(Use.EXACT), RECOMPUTED.format(aten)
            elif user not in seen:
                seen.add(user)
                operation = joint.operations.get(number)
                is_norm = operation is not None and operation.row.op in NORMS
                stack.append(Reached(user, entry, number, reached.is_centered or is_norm))


@dataclass(frozen=True, eq=False)
class Reached:
    """Describes a value that backward recomputes from a saved tensor, and how the search reached it.

    `number`: the seq_nr of the operation that computes it. `entry`: the input of this operation that depends on the saved tensor.
    """

    value: fx.Node
    entry: fx.Node
    number: int
    is_centered: bool = False


def _is_power(node: fx.Node) -> bool:
    """Return whether a node is x ** n with a constant n of at least 1."""
    exponent = node.args[1] if aten_name(node) == "pow" and len(node.args) > 1 else None
    return isinstance(exponent, int | float) and exponent >= 1


def _use(value: fx.Node, user: fx.Node, joint: JointGraph, is_centered: bool) -> Iterator[FoundUse]:
    number = joint.numbers.get(user.name, -1)
    operation = joint.operations.get(number)
    if operation is None:
        aten = aten_name(user)
        is_product = aten in PRODUCTS
        needs = Needs(Use.VALUE, UNKNOWN, is_centered) if is_product else Needs(Use.EXACT)
        yield number, f":{aten}", needs, "" if is_product else UNKNOWN_OPERATION.format(aten)
        return
    operand = _operand(value, user, operation)
    if operand.use is Use.SHAPE:
        return
    needs = Needs(operand.use, operand.pin, operand.is_centered or is_centered)
    reason = operand.reason if operand.use is Use.EXACT else ""
    if operation.row.op in PERIODIC:
        needs, reason = Needs(Use.EXACT), PHASE.format(operation.row.op)
    if operand.use not in (Use.VALUE, Use.EXACT):  # signs and masks are saved as bits; other uses of their tensor read its values
        needs = Needs(Use.VALUE, NONLINEAR, is_centered)
    yield number, operation.slot(operand.name), needs, reason


def _code_uses(codes: fx.Node, joint: JointGraph, *, is_centered: bool) -> Iterator[FoundUse]:
    """Yield the uses of 8-bit codes as inputs of the layers that multiply them."""
    for number, operation in joint.operations.items():
        if operation.aten == QUANTIZE and any(node.name == codes.name for node in operation.nodes):
            operand = operation.row.operands["input"]
            yield number, operation.slot(operand.name), Needs(Use.VALUE, None, is_centered), ""


def _operand(value: fx.Node, user: fx.Node, operation: GraphOperation) -> Operand:
    """Return the row in the table of operations for the operand that `user`, a node of `operation`, reads as `value`."""
    row = operation.row
    if row.op == ATTENTION:
        name = argument_name(user, value)
        return row.operands.get(name) or _exact(name, row.op)
    if not row.operands:
        return Operand("input", pin=UNKNOWN) if aten_name(user) in PRODUCTS else _exact("input", operation.aten)
    names = {node.name for node in operation.nodes}
    if value.name in names and row.op in NORMS and _num_values(value) < max(_num_values(node) for node in operation.nodes):
        return Operand("statistics", Use.EXACT, reason=STATISTIC)
    if value.name in names:
        outputs = [o for attribute, o in row.operands.items() if attribute.startswith(WITH_OUTPUT)]
        is_output = any(user.name not in names for node in operation.nodes if node.name == value.name for user in node.users)
        values = [o for o in outputs if o.use is Use.VALUE or not o.is_minor]
        if values and is_output:
            return values[0]
        if row.op in NORMS:  # normalized values have the error of the input, in units of their standard deviation
            return Operand("output", is_centered=True)
        return Operand("output", pin=NONLINEAR, is_centered=True) if row.op in SMOOTH else _exact("output", row.op)
    inputs = [(attribute, o) for attribute, o in row.operands.items() if not attribute.startswith(WITH_OUTPUT)]
    if not inputs and row.op in SMOOTH:  # backward uses the output alone, which it recomputes from `value`
        return Operand("input")
    return _input(value, operation, inputs)


def _input(value: fx.Node, operation: GraphOperation, inputs: list[tuple[str, Operand]]) -> Operand:
    """Return the operand of `operation` that `value` is; if it is several, the one that allows least rounding."""
    second = [node for node in operation.nodes if len(node.args) > 1 and _is_same(node.args[1], value)]
    first = [node for node in operation.nodes if node.args and _is_same(node.args[0], value)]
    named = dict(inputs)
    if operation.row.op == "pow":
        exponent = operation.nodes[0].args[1] if len(operation.nodes[0].args) > 1 else None
        is_smooth = isinstance(exponent, int | float) and exponent >= 1
        return Operand("input", pin=NONLINEAR) if is_smooth else _exact("input", "pow")
    if second and not first and "other" in named:
        return named["other"]
    if first and not second and "self" in named:
        return named["self"]
    major = [o for _, o in inputs if not o.is_minor]
    if operation.row.op in NORMS or len(major) == 1:
        return major[0] if major else _exact("input", operation.row.op)
    exact = [o for o in major if o.use is Use.EXACT]
    pinned = sorted(major, key=lambda o: -(o.pin.significant_bits if o.pin else 0))
    weightless = [o for o in pinned if o.name != "weight"]
    return exact[0] if exact else (weightless or pinned)[0] if pinned else _exact("input", operation.row.op)


def _is_same(argument: Any, value: fx.Node) -> bool:
    return isinstance(argument, fx.Node) and argument.name == value.name


def argument_name(node: fx.Node, value: fx.Node) -> str:
    """Return the argument name under which a node of attention's backward receives `value`; "" if it does not."""
    schema = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    named = {argument.name: given for argument, given in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    found = next((name for name, given in named.items() if _is_same(given, value)), "")
    return "output" if found == "out" else found


def _exact(name: str, operation: str) -> Operand:
    return Operand(name, Use.EXACT, reason=UNKNOWN_OPERATION.format(operation))


# --- names ------------------------------------------------------------------------------------------------------------


def aten_name(node: fx.Node) -> str:
    """Return the name of the aten operation that a node came from before decomposition, such as "native_layer_norm"."""
    target = node.meta.get("original_aten") or node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def module_path(stack: Any, roots: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Return the path of the module in which a node was created, and whether it is a leaf module of torch.nn.

    The path is as in named_modules(). `roots`: see `read_joint_graph`. Operations of the compiled function itself have no stack.

    >>> module_path({"a": ("L['self'].layers._modules['3'].fc", torch.nn.Linear)})
    ('layers.3.fc', True)
    >>> module_path({"a": ("L['self'].fc", torch.nn.Linear)}, {"self": "layers.3"})
    ('layers.3.fc', True)
    """
    roots = roots or {}
    if not stack:
        return roots.get("self", ""), False
    key, (text, kind) = list(stack.items())[-1]
    root, inside = root_and_path(str(text))
    path = ".".join(part for part in (roots.get(root, ""), inside) if part)
    repeat = str(key).rpartition("@")[2] if "@" in str(key) else ""
    qualified = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return f"{path}@{int(repeat) + 1}" if repeat.isdigit() else path, str(qualified).startswith("torch.nn.modules.")


def root_and_path(source: str) -> tuple[str, str]:
    """Return the parts of Dynamo's name of a module or parameter: the variable in front, and the path after it.

    >>> root_and_path("L['self'].layers._modules['3'].fc")
    ('self', 'layers.3.fc')
    """
    text = source.replace("._parameters", "")
    path = _PATH.sub(lambda match: "." + next(group for group in match.groups() if group is not None), text)
    found = re.match(r"(?:L|G)\.([^.]*)\.?(.*)", path)
    return (found[1], found[2].strip(".")) if found else ("", path.strip("."))


def _operation(node: fx.Node, counts: dict[tuple[str, str], int], roots: Mapping[str, str]) -> GraphOperation:
    row = row_of(_row_name(node))
    module, is_leaf = module_path(node.meta.get("nn_module_stack"), roots)
    counts[module, row.op] = counts.get((module, row.op), 0) + 1
    return GraphOperation(aten_name(node), row, module, is_leaf, count=counts[module, row.op])


def _row_name(node: fx.Node) -> str:
    """Return the name of a node's operation in the table of operations, such as "NativeLayerNorm"."""
    bare = aten_name(node).replace("_", "").lower()
    return ROW_NAMES.get(bare) or ALIASES.get(bare) or aten_name(node)


def _name(operation: GraphOperation | None, aten: str) -> str:
    return operation.slot("input") if operation is not None else f":{aten}"


def is_boolean(node: fx.Node) -> bool:
    """Return whether a node is a tensor of booleans."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool


def _is_integer(node: fx.Node) -> bool:
    """Return whether a node computes integers, such as indices, which rounded inputs could change."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def hint(size: Any) -> int:
    """Return a size as an int; for a symbolic size, its value in the example inputs."""
    return size if isinstance(size, int) else int(size.node.hint)


def _num_values(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, Tensor) else 0


def _is_random(node: fx.Node) -> bool:
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
