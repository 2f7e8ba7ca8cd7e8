"""`rewrite_head` puts a cross entropy in chunks into a graph of torch.compile, and defers logits that leave it.

It edits the graph that Dynamo makes, before autograd is traced. It follows the result of the head's linear layer through the
functions that deferred logits record (loss/deferred_logits.py):

    linear -> float -> view -> cross_entropy      becomes   view of hidden states -> paredown::chunked_loss
    linear -> output of the graph                 becomes   hidden states as the output; `DeferredOutputs` turns them into deferred
                                                            logits at each call, for a loss outside of the graph

Where another function in the graph reads the logits, the graph is left unmodified, and `HeadUse` records the name of the function.
"""

# pyright: reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from paredown.loss.chunked_cross_entropy import CASTS, SCALES, elementwise_call, without_last_casts
from paredown.loss.deferred_logits import HeadUse, defer
from paredown.loss.held_linear import HeldLinear
from paredown.loss.loss_operator import OperatorSettings, chunked_loss
from paredown.loss.recorded_calls import SWAPS, VIEWS, keeps_last

LINEARS = (functional.linear, torch._C._nn.linear)
DYNAMIC = "{} with dynamic sizes"
SIZES = ("view", "reshape")  # take the sizes of their result
IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")


@dataclass(frozen=True)
class Followed:
    """A node of a graph whose value is logits, with the hidden states and functions from which it can be computed.

    `rows`: its hidden states, of the same shape but for the last dimension. `calls`: elementwise functions so far; `path`: the nodes
    from the head on; `is_class_first`: the classes are dimension 1.
    """

    node: fx.Node
    rows: fx.Node
    calls: tuple[tuple[str, Any], ...] = ()
    path: tuple[fx.Node, ...] = ()
    is_class_first: bool = False

    @property
    def value(self) -> Tensor:
        """The logits as Dynamo traced them: a fake tensor, with a shape and a dtype."""
        return self.node.meta["example_value"]


@dataclass(frozen=True)
class DeferredOutput:
    """How to restore one output of a rewritten graph, which was logits and now is their hidden states.

    `calls`: the functions that make the original output from deferred logits.
    """

    index: int
    operands: tuple[int, int | None]  # places of weight and bias among the inputs of the graph, whose callers may pass others
    dtype: torch.dtype
    calls: tuple[Callable[[Any], Any], ...]


@dataclass(frozen=True)
class DeferredOutputs:
    """A function that restores the outputs of a rewritten graph at each call: hidden states become deferred logits."""

    use: HeadUse
    module: nn.Linear
    outputs: tuple[DeferredOutput, ...]

    def __call__(self, results: Any, inputs: Sequence[Any]) -> Any:
        """Return the original outputs, given the `results` of the rewritten graph and the `inputs` of this call."""
        results, made = list(results), dict[Any, Any]()
        for output in self.outputs:
            hidden, (weight, bias) = results[output.index], output.operands
            logits = made.get(key := (id(hidden), output.operands))
            if logits is None:
                held = HeldLinear(hidden, inputs[weight], inputs[bias] if bias is not None else None)
                logits = made[key] = defer(self.use, held, output.dtype)
            for call in output.calls:
                logits = call(logits)
            results[output.index] = logits if self.module.training else logits.logits()
        return results


def rewrite_head(gm: fx.GraphModule, inputs: Sequence[Any], module: nn.Linear, use: HeadUse) -> DeferredOutputs | None:
    """Rewrite a graph of Dynamo so that the loss of `module`'s logits is computed in chunks; `use` counts what was done.

    `inputs`: examples of the graph's inputs. Returns an object that restores the graph's original outputs at each call; None if the
    graph does not have the module, or is left unmodified.
    """
    examples = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
    heads = [node for node in gm.graph.nodes if is_head(node, examples, module)]
    places = {node: place for place, node in enumerate(examples)}
    outputs = [output for node in heads for output in HeadGraph(gm, node, use, places).rewrite()]
    use.num_graphs += bool(heads)
    if heads:
        gm.recompile()  # without eliminate_dead_code: Dynamo's graphs have in-place functions, which FX takes for pure ones
    return DeferredOutputs(use, module, tuple(outputs)) if outputs else None


def is_head(node: fx.Node, examples: dict[fx.Node, Any], module: nn.Linear) -> bool:
    """Return whether a node of a graph calls the linear function of `module`, which must be in training mode.

    `examples` has an example of each input of the graph. The node's result must require a gradient.
    """
    if node.op != "call_function" or node.target not in LINEARS or node.kwargs or not isinstance(node.args[1], fx.Node):
        return False
    value = node.meta.get("example_value")
    return examples.get(node.args[1]) is module.weight and isinstance(value, Tensor) and value.requires_grad and module.training


class HeadGraph:
    """The rewriting of a graph for one call of the output head: it follows the logits, then replaces losses and outputs."""

    def __init__(self, gm: fx.GraphModule, linear: fx.Node, use: HeadUse, places: dict[fx.Node, int]) -> None:
        self.graph, self.linear, self.use, self.places = gm.graph, linear, use, places
        arguments: tuple[Any, ...] = (*linear.args, None)
        self.hidden, self.weight, self.bias = arguments[:3]
        self.size = self.hidden.meta["example_value"].shape[-1]
        self.losses: list[tuple[Followed, dict[str, Any]]] = []
        self.sizes: list[tuple[Followed, fx.Node]] = []
        self.returned: list[tuple[Followed, fx.Node]] = []
        self.readers: list[str] = []
        self.followed: list[fx.Node] = []

    def rewrite(self) -> list[DeferredOutput]:
        """Replace all logits, unless something needs their values; return how to restore outputs of the graph that were logits."""
        before = list(self.graph.nodes)
        self._follow(Followed(self.linear, self.hidden))
        self.readers += self._writers(before[before.index(self.linear) + 1 :])
        if self.readers or not (self.losses or self.returned):
            self.use.requests.update(dict.fromkeys(self.readers, 1))
            self._erase(before)
            return []
        for logits, given in self.losses:
            self._replace_loss(logits, given)
        for logits, node in self.sizes:
            with self.graph.inserting_before(node):
                node.replace_all_uses_with(self.graph.call_method("size", (logits.rows, *node.args[1:])))
        self.use.num_losses += len(self.losses)
        outputs = [output for logits, node in self.returned for output in self._replace_output(logits, node)]
        self._erase([node for node in before if node not in self.followed])
        return outputs

    def _erase(self, kept: list[fx.Node]) -> None:
        known = set(kept)
        for node in reversed(list(self.graph.nodes)):
            if node not in known and not node.users and node.op != "output":
                self.graph.erase_node(node)

    def _writers(self, later: list[fx.Node]) -> list[str]:
        """Return the names of functions among the nodes `later` that write to the head's input, weight or bias in place.

        The loss in chunks is computed later than the head was, and would read the new values.
        """
        read = {storage_of(t.meta["example_value"]) for t in (self.hidden, self.weight, self.bias) if t is not None}
        tensors = [(node, [i.meta.get("example_value") for i in node.all_input_nodes]) for node in later if is_in_place(node)]
        return [f"{name_of(node)} in place" for node, values in tensors if any(storage_of(value) in read for value in values)]

    # --- reading ---

    def _follow(self, logits: Followed) -> None:
        self.followed.append(logits.node)
        for user in list(logits.node.users):
            if user.op == "output":
                self._add_output(logits, user)
                continue
            name = name_of(user)
            if user.target is functional.cross_entropy:
                given = cross_entropy_arguments(user, logits)
                self.losses += [(replace(logits, path=(*logits.path, user)), given)] if given is not None else []
                self.followed.append(user)
                self.readers += [name] if given is None else []
            elif (
                name == "size"
                and len(user.args) == 2
                and user.args[1] in range(logits.value.dim() - 1)
                and not logits.is_class_first
            ):
                self.sizes.append((logits, user))
                self.followed.append(user)
            elif (found := self._followed(logits, user, name)) is not None:
                self._follow(found)
            else:
                self.readers.append(name)

    def _add_output(self, logits: Followed, output: fx.Node) -> None:
        dynamic = [node for node in logits.path if len(node.all_input_nodes) > 1]
        self.readers += [DYNAMIC.format(name_of(node)) for node in dynamic]
        if self.bias is not None and self.bias not in self.places:
            self.readers.append(f"a sum with {name_of(self.bias)}")
        self.returned.append((logits, output))

    def _followed(self, logits: Followed, user: fx.Node, name: str) -> Followed | None:
        """Return what the logits become at the node `user`, which calls the function `name`; None if it needs their values."""
        value = user.meta.get("example_value")
        if not isinstance(value, Tensor) or logits.is_class_first or value.device != logits.value.device:
            return None
        if logits.node not in user.args or is_in_place(user):
            return None
        found = replace(logits, node=user, path=(*logits.path, user))
        if name in SWAPS:
            return replace(found, is_class_first=True) if is_class_first(value, logits.value) else None
        if value.shape[-1:] != logits.value.shape[-1:]:
            return None
        if name in CASTS or name in SCALES or name == "tanh":
            return self._elementwise(found, logits, user, name)
        if value.dtype is not logits.value.dtype or user.args[0] is not logits.node:
            return None
        if name == "getitem":
            return replace(found, rows=self._same(user, logits.rows)) if keeps_last(user.args[1], logits.value.dim()) else None
        if name == "contiguous":
            return found
        is_view = name in VIEWS and name != "unflatten" and not (name in SIZES and user.kwargs)
        return replace(found, rows=self._reshaped(user, logits.rows, name)) if is_view else None

    def _elementwise(self, found: Followed, logits: Followed, user: fx.Node, name: str) -> Followed | None:
        others = [arg for arg in user.args if arg is not logits.node]
        value: Tensor = user.meta["example_value"]
        if not value.is_floating_point():
            return None
        if name in SCALES:
            is_number = len(others) == 1 and type(others[0]) in (int, float) and not user.kwargs
            if not is_number or ("div" in name and user.args[0] is not logits.node):
                return None
        elif (name == "tanh" and (others or user.kwargs)) or len(user.all_input_nodes) > 1 or "copy" in user.kwargs:
            return None
        call = elementwise_call(name, others[0] if others else None, value.dtype)
        return replace(found, calls=(*logits.calls, call))

    def _same(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """Insert a call that does to the hidden states `rows` what `node` does to the logits, and return its node."""
        with self.graph.inserting_before(node):
            return self.graph.create_node(node.op, node.target, (rows, *node.args[1:]), dict(node.kwargs))

    def _reshaped(self, node: fx.Node, rows: fx.Node, name: str) -> fx.Node:
        if name not in SIZES:
            return self._same(node, rows)
        first: Any = node.args[1] if len(node.args) > 1 else ()
        sizes = first if isinstance(first, tuple | list) else node.args[1:]
        with self.graph.inserting_before(node):
            return self.graph.call_method("reshape", (rows, (*sizes[:-1], self.size)))

    # --- writing ---

    def _replace_loss(self, logits: Followed, given: dict[str, Any]) -> None:
        """Replace a cross entropy by the operator that computes it in chunks; `given` are its arguments by name."""
        node, graph = logits.path[-1], self.graph
        wanted: Tensor = node.meta["example_value"]
        settings = self._settings(logits, given)
        with graph.inserting_before(node):
            rows = graph.call_method("reshape", (logits.rows, (-1, self.size)))
            target = graph.call_method("reshape", (given["target"], (-1,)))
            arguments = (rows, self.weight, self.bias, target, given["weight"], settings.text)
            result = graph.call_function(chunked_loss._opoverload, arguments)
            loss = graph.call_function(operator.getitem, (result, 0))
            if settings.reduction == "none":
                loss = graph.call_method("view_as", (loss, given["target"]))
            loss = graph.call_method("to", (loss, wanted.dtype))
        for made in (result, loss):
            made.meta["nn_module_stack"] = self.linear.meta.get("nn_module_stack", {})
        node.replace_all_uses_with(loss)

    def _settings(self, logits: Followed, given: dict[str, Any]) -> OperatorSettings:
        product: Tensor = self.linear.meta["example_value"]
        tensors = (self.hidden, self.weight, self.bias)
        hidden, weight, bias = (t is not None and t.meta["example_value"].requires_grad for t in tensors)
        transform = without_last_casts(logits.calls, product.dtype)
        return OperatorSettings(
            str(product.dtype).removeprefix("torch."),
            self.use.device or product.device.type,
            (hidden, weight, bias),
            transform.calls if transform is not None else (),
            given["ignore_index"],
            given["reduction"],
            given["label_smoothing"],
        )

    def _replace_output(self, logits: Followed, output: fx.Node) -> list[DeferredOutput]:
        """Replace `logits` among the graph's outputs by hidden states; return how to restore each of these outputs."""
        values = list(output.args[0])  # type: ignore[arg-type]
        places = [index for index, value in enumerate(values) if value is logits.node]
        output.args = (tuple(self.hidden if value is logits.node else value for value in values),)
        calls = tuple(as_function(node, previous) for previous, node in zip((self.linear, *logits.path), logits.path, strict=False))
        operands = self.places[self.weight], self.places[self.bias] if self.bias is not None else None
        return [DeferredOutput(index, operands, self.linear.meta["example_value"].dtype, calls) for index in places]


def name_of(node: fx.Node) -> str:
    """Return the name of the function that a node calls, as `deferred_logits.name_of` spells it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return {"truediv": "div"}.get(name, name)


def is_in_place(node: fx.Node) -> bool:
    """Return whether the function that a node calls may write to one of its arguments."""
    name = name_of(node)
    has_mark = (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE or "out" in node.kwargs
    return has_mark or node.kwargs.get("inplace") is True or (callable(node.target) and True in node.args and name != "getitem")


def storage_of(value: Any) -> int | None:
    """Return the address of a traced tensor's storage; None for other values."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def is_class_first(value: Tensor, before: Tensor) -> bool:
    """Return whether `value` is `before` with its last dimension moved to dimension 1."""
    if before.dim() < 3:
        return False
    order = (0, before.dim() - 1, *range(1, before.dim() - 1))
    expected = before.permute(order)
    return value.shape == expected.shape and value.stride() == expected.stride()


def cross_entropy_arguments(node: fx.Node, logits: Followed) -> dict[str, Any] | None:
    """Return, by name, the arguments with which a node calls F.cross_entropy; None if that call needs all logits."""
    bound = inspect.signature(functional.cross_entropy).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    target = given["target"]
    if given["input"] is not logits.node or target is logits.node or given["weight"] is logits.node:
        return None
    value = target.meta.get("example_value") if isinstance(target, fx.Node) else None
    is_matrix = logits.value.dim() == 2 or logits.is_class_first
    if not isinstance(value, Tensor) or not is_matrix or value.dtype is not torch.int64 or value.dim() != logits.value.dim() - 1:
        return None
    is_known = type(given["ignore_index"]) is int and type(given["label_smoothing"]) in (int, float)
    if not is_known or given["size_average"] is not None or given["reduce"] is not None:
        return None
    return dict(given) if given["reduction"] in ("mean", "sum", "none") else None


def as_function(node: fx.Node, logits: fx.Node) -> Callable[[Any], Any]:
    """Return the call of `node` as a function of one of its inputs, `logits`, with all other arguments fixed."""
    function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    args, kwargs = node.args, dict(node.kwargs)
    return lambda value: function(*(value if arg is logits else arg for arg in args), **kwargs)
