"""Compiles random programs quickly: the graphs of torch.compile and of `session.compile()` run operation by operation.

Inductor takes 5 to 10 seconds for the kernels of a program. Dynamo, AOTAutograd, the passes of Inductor over joint graphs and the
partitioner are what a session takes part in: they are torch's own here, and the two graphs that come of them run as PyTorch operations.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx, view_to_reshape

from paredown.session.compiled import graph_packing
from paredown.session.session import Session

RECOMPILES = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}


def run_graph(gm: fx.GraphModule, example_inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
    """In place of Inductor's kernels: the operations of a graph, one after the other."""
    view_to_reshape(gm)  # as Inductor does first: it may lay out tensors in other ways
    gm.recompile()

    def run(inputs: list[Any]) -> Any:
        given = list(inputs)
        inputs.clear()
        return gm(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


compile_quickly = partial(compile_fx, inner_compile=run_graph)  # type: ignore[arg-type]


def compiled_model(model: nn.Module, session: Session | None) -> Any:
    """The model compiled, in the session if there is one."""
    if session is not None:
        return session.compile()
    return torch.compile(model, backend=compile_quickly)


@contextmanager
def runs_graphs(**settings: bool) -> Generator[None]:
    """A context in which graphs that sessions compile in this thread run operation by operation. `settings`: of AOTAutograd."""
    without_cache = {"enable_autograd_cache": False, **settings}  # the cache may have kernels of Inductor
    with patch.object(graph_packing, "compile_fx_inner", run_graph), functorch_config.patch(without_cache):
        yield


@contextmanager
def compiles_quickly(*, retains_graph: bool = False) -> Generator[None]:
    """The same from a new start, with the random numbers of eager mode.

    `retains_graph`: backward is called twice, which torch refuses where backward may write to the memory of saved tensors.
    """
    torch._dynamo.reset()
    with (
        runs_graphs(donated_buffer=not retains_graph),
        inductor_config.patch({"fallback_random": True}),
        torch._dynamo.config.patch(RECOMPILES),
    ):
        yield
    torch._dynamo.reset()
