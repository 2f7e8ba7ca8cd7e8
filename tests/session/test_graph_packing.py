"""The private API of torch that compiled sessions use is there, and slots of graph nodes have the names of eager mode."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from paredown import Plan
from paredown.autograd.operations import Use
from paredown.session.compiled.graph_packing import PlanPartitioner
from paredown.session.compiled.graph_slots import argument_name, aten_name, module_path, num_recomputed_sums, read_joint_graph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
FILE = "src/paredown/session/compiled"
# module: {name: parameters that the files there pass}
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "torch._functorch.partitioners": {
        "min_cut_rematerialization_partition": ("num_fwd_outputs", "static_lifetime_input_indices"),
        "get_default_op_list": (),
    },
    "torch._functorch.compile_utils": {"fx_graph_cse": ("fx_g",)},
    "torch._functorch._aot_autograd.utils": {"_is_primal": ("node",), "_is_tangent": ("node",)},
    "torch._inductor.compile_fx": {"compile_fx": ("inner_compile", "config_patches"), "compile_fx_inner": ()},
    "torch._inductor.custom_graph_pass": {"CustomPartitionerFn": ()},
    "torch._inductor.decomposition": {"select_decomp_table": ()},
    "torch._dynamo.source": {"ConstantSource": ("source_name",)},
    "torch.fx.experimental.proxy_tensor": {"make_fx": ("decomposition_table",)},
    "torch": {"_TorchCompileInductorWrapper": ("mode", "options", "dynamic")},
}


def moved(what: str) -> str:
    return f"torch {torch.__version__} has no {what}, which {FILE} uses: compiled sessions need the files there adapted to this version."


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in USED.items() for name in names])
def test_private_functions_of_torch_are_there(module: str, name: str) -> None:
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        found = None
    assert found is not None, moved(f"{module}.{name}")
    parameters = inspect.signature(found).parameters if USED[module][name] else {}
    for parameter in USED[module][name]:
        assert parameter in parameters, moved(f"parameter {parameter} of {module}.{name}")


def test_private_settings_of_torch_are_there() -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    from paredown.session.compiled import graph_packing

    for name in ("enable_autograd_cache", *graph_packing.RECOMPUTES, *graph_packing.BREAKS_CHAINS):
        assert hasattr(functorch_config, name), moved(f"torch._functorch.config.{name}")
    for name in ("custom_partitioner_fn", *graph_packing.INLINES, *graph_packing.FREES):
        assert hasattr(inductor_config, name), moved(f"torch._inductor.config.{name}")


def test_private_attributes_of_torch_are_there() -> None:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    wrapper = torch._TorchCompileInductorWrapper("reduce-overhead", {"max_fusion_size": 3}, None)
    assert isinstance(getattr(wrapper, "config", None), dict), moved("torch._TorchCompileInductorWrapper.config")
    assert wrapper.config["triton.cudagraphs"] is True and wrapper.config["max_fusion_size"] == 3
    abstract = getattr(CustomPartitionerFn, "__abstractmethods__", frozenset())
    assert abstract == {"__call__", "uuid"}, moved(f"CustomPartitionerFn of __call__ and uuid alone (it has {sorted(abstract)})")
    parameters = list(inspect.signature(CustomPartitionerFn.__call__).parameters)
    assert parameters[:3] == ["self", "gm", "joint_inputs"], moved("CustomPartitionerFn.__call__(gm, joint_inputs)")
    node = fx.Graph().placeholder("x")
    assert hasattr(node, "_sort_key"), moved("fx.Node._sort_key")


def test_the_sentence_names_file_and_version() -> None:
    assert torch.__version__ in moved("f") and FILE in moved("f")


# --- names ------------------------------------------------------------------------------------------------------------

PATHS: dict[str, tuple[dict[str, Any], tuple[str, bool]]] = {
    "no module": ({}, ("", False)),
    "the root": ({"": ("L['self']", nn.Sequential)}, ("", True)),
    "a child of a Sequential": ({"": ("L['self']._modules['0']", nn.ReLU)}, ("0", True)),
    "a layer of a list": ({"a": ("L['self'].layers._modules['3'].fc", nn.Linear)}, ("layers.3.fc", True)),
    "an index": ({"a": ("L['self'].layers[3].fc", nn.Linear)}, ("layers.3.fc", True)),
    "a key": ({"a": ("L['self'].heads['left']", nn.Linear)}, ("heads.left", True)),
    "a class of the user": ({"a": ("L['self'].block", type("Block", (), {}))}, ("block", False)),
    "the innermost counts": ({"a": ("L['self'].block", dict), "b": ("L['self'].block.norm", nn.LayerNorm)}, ("block.norm", True)),
    "a name of a class": ({"a": ("L['self'].norm", "torch.nn.modules.normalization.LayerNorm")}, ("norm", True)),
    "the second call of a module": ({"a@1": ("L['self'].norm", nn.LayerNorm)}, ("norm@2", True)),
}


@pytest.mark.parametrize("case", PATHS)
def test_module_paths(case: str) -> None:
    stack, expected = PATHS[case]
    assert module_path(stack) == expected


def graph_of(function: Callable[..., Any], *values: Tensor) -> fx.Graph:
    return make_fx(function)(*values).graph


def test_operations_are_numbered_in_their_module() -> None:
    """Two products of one module that has children, and one of a leaf; nodes carry what autograd writes into a joint graph."""
    graph = graph_of(lambda x: ((x * x) * x).tanh(), torch.ones(2))
    inside = {"a": ("L['self'].block", type("Block", (), {}))}
    for number, node in enumerate(node for node in graph.nodes if node.op == "call_function"):
        leaf = {"a": ("L['self'].block.act", nn.Tanh)}
        node.meta |= {"seq_nr": number, "nn_module_stack": leaf if number == 2 else inside}
    joint = read_joint_graph(graph, [], {node.name for node in graph.nodes})
    first, second, third = (joint.operations[number] for number in range(3))
    assert [first.slot("self"), second.slot("self"), third.slot("output")] == [
        *("block:mul.self", "block:mul#2.self", "block.act:output"),
    ]
    assert third.row.operands["result"].use is Use.VALUE
    assert [aten_name(operation.nodes[0]) for operation in (first, third)] == ["mul", "tanh"]


def test_operations_that_the_partitioner_merges_have_the_nodes_of_the_first() -> None:
    graph = graph_of(lambda x: (x * 2).tanh() + (x * 2).tanh(), torch.ones(2))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for number, node in enumerate(calls):
        node.meta["seq_nr"] = number
    merged = {calls[2].name, calls[3].name}
    joint = read_joint_graph(graph, [], {node.name for node in graph.nodes} - merged)
    assert [joint.operations[number].nodes for number in range(5)] == [[calls[number]] for number in (0, 1, 0, 1, 4)]


def test_what_depends_on_inputs() -> None:
    graph = graph_of(lambda x, w: (x + w, w * 2), torch.ones(2), torch.ones(2))
    inputs, parameter = graph.find_nodes(op="placeholder")
    joint = read_joint_graph(graph, [parameter], {node.name for node in graph.nodes})
    names = {aten_name(node): node.name for node in graph.nodes if node.op == "call_function"}
    assert inputs.name in joint.of_inputs and names["add"] in joint.of_inputs
    assert parameter.name not in joint.of_inputs and names["mul"] not in joint.of_inputs


def test_sums_that_backward_recomputes() -> None:
    graph = graph_of(lambda x, y: ((x + y) * 2 + y) + 1.0 + (x + x), torch.ones(2), torch.ones(2))
    assert num_recomputed_sums(graph) == 3, "a constant is no summand, and x + x has one input"
    for node in graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert num_recomputed_sums(graph) == 0


def test_operands_of_attention_are_found_by_the_names_of_arguments() -> None:
    """The kernels order them differently: the efficient one has a bias before its output."""
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("grad", "q", "k", "v", "bias", "out", "lse")]
    node = graph.call_function(backward, tuple(nodes))
    expected = ["grad_out_", "query", "key", "value", "attn_bias", "output", "logsumexp"]
    assert [argument_name(node, given) for given in nodes] == expected
    assert argument_name(node, graph.placeholder("other")) == ""


def cache_key(plan: Plan, seed: int = 0, **options: Any) -> bytes:
    """What Inductor hashes for its caches: the pickled settings."""
    return pickle.dumps(PlanPartitioner(plan, seed, lambda *_: None, **options))


def test_the_keys_of_inductors_caches_identify_the_plan() -> None:
    """Equal for equal plans, whatever their reasons; different for another format, rounding, seed, recomputed slot or kept slot."""
    plan = Plan.uniform(activation="int8/64@bf16")
    others = [
        cache_key(Plan.uniform(activation="int4/64@bf16")),
        cache_key(Plan.uniform(activation="int8/64@bf16", rounding="stochastic")),
        cache_key(plan.recomputing("layers.0:input")),
        cache_key(plan, seed=1),
        cache_key(plan, has_guard=True),
        cache_key(plan, kept={("layers.0:input",): "its values"}),
    ]
    assert cache_key(plan) == cache_key(Plan(plan.rules, reason="another sentence"))
    assert len({cache_key(plan), *others}) == 1 + len(others)
