"""Compiled sessions in two processes of gloo: DDP with several buckets and FSDP2.

Graphs run operation by operation (tests/programs/compiling.py); in `make test-all` also as kernels of Inductor. The reference
is the same step without a session.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paredown import Plan, Session, apply
from paredown.models.transformer import GPT, GPTConfig, token_loss
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT4, INT8, assert_same, relative_error
from tests.support.processes import needs_gloo, run_on_two
from tests.support.scale import SCALE

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore")]  # of the libraries below, about this machine
CONFIG = GPTConfig(dim=192, num_layers=2, num_heads=4, vocabulary=101, context=32)
NUM_STEPS = 3
PACKED_BYTES = 2 * 4 * 32 * 4 * 192  # one byte for each input of the GELUs
PLANS = {"exact": Plan.uniform(activation="fp32"), "int8": Plan.uniform(activation=INT8)}


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * number + rank)
    tokens = torch.randint(CONFIG.vocabulary, (4, CONFIG.context + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def replicated(model: GPT, plan: Plan | None) -> tuple[nn.Module, Session | None]:
    """DDP around the compiled model: it splits the graph at its buckets."""
    session = apply(plan, model) if plan is not None else None
    compiled = model if session is None else session.compile()
    return DistributedDataParallel(compiled, bucket_cap_mb=1), session


def replicated_first(model: GPT, plan: Plan | None) -> tuple[nn.Module, Session | None]:
    """The session of a model that DDP wraps already."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    session = apply(plan, wrapped) if plan is not None else None
    return (wrapped if session is None else session.compile()), session


def sharded(model: GPT, plan: Plan | None) -> tuple[nn.Module, Session | None]:
    """Each layer by itself, resharded after its forward pass."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    session = apply(plan, model) if plan is not None else None
    return (model if session is None else session.compile()), session


WRAPS = {"ddp": replicated, "ddp first": replicated_first, "fsdp2": sharded}


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def steps(wrap: Callable[..., Any], plan: Plan | None, rank: int, *, in_bf16: bool = False) -> dict[str, Any]:
    """Losses, the gradients of the first step, the parameters after the last one, and what the session stored and compiled."""
    model, before = gpt(), counters["aot_autograd"]["total"]
    run, session = wrap(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "compiled": [], "stored": []}
    for number in range(NUM_STEPS):
        ids, targets = batch(number, rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            logits = run(ids)
        found["stored"].append(session.stored_bytes if session is not None else 0)
        loss = token_loss(logits.float(), targets)
        loss.backward()
        found.setdefault("gradients", [full(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["compiled"].append(counters["aot_autograd"]["total"] - before)
    found["parameters"] = [full(p) for p in model.parameters()]
    if session is not None:
        assert session.stored_bytes == 0
        found["changes"] = [(change.slot, change.given, change.reason) for change in session.changes]
        found["packed"] = packed(session)
        found["graphs"] = len(session._compiled.reports)  # type: ignore[union-attr]
    return found


def packed(session: Session) -> set[str]:
    assert session._compiled is not None
    return {name for d in session._compiled.decisions.values() if d.format is not None for name in d.slot.names}


QUICK = [("ddp", "exact"), ("ddp first", "int8"), ("fsdp2", "int8")]
REST = [("ddp", "int8"), ("fsdp2", "exact")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]


def worker(rank: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {(wrap, "none"): steps(WRAPS[wrap], None, rank) for wrap in WRAPS}
    for wrap, plan in [*QUICK, *(REST if SCALE > 1 else [])]:
        with compiles_quickly():
            found[wrap, plan] = steps(WRAPS[wrap], PLANS[plan], rank)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_on_two(worker, tmp_path_factory.mktemp("two"))


def assert_near(found: dict[str, Any], plain: dict[str, Any], *, least: float, most: float) -> None:
    """Gradients of the first step within these relative errors; losses and parameters of all steps within the larger one."""
    assert least < relative_error(found["gradients"], plain["gradients"]) < most
    assert relative_error(found["parameters"], plain["parameters"]) < most
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(plain["losses"]), rtol=most, atol=0)


@pytest.mark.parametrize(("wrap", "plan"), CASES)
def test_gradients_are_those_of_the_unmodified_model(results: list[dict[Any, Any]], wrap: str, plan: str) -> None:
    """The reference is eager DDP or FSDP2 without a session; the exact plan differs from it by the order of float32 sums."""
    errors = {"exact": {"least": -1.0, "most": 1e-5}, "int8": {"least": 1e-4, "most": 0.03}}[plan]
    for process in results:
        assert_near(process[wrap, plan], process[wrap, "none"], **errors)
    assert_same(results[0][wrap, plan]["parameters"], results[1][wrap, plan]["parameters"])
    other = steps(lambda model, *_, **__: (model, None), None, 1)  # of one process alone
    assert relative_error(results[1][wrap, plan]["gradients"], other["gradients"]) > 0.1, "gradients are those of both processes"


@pytest.mark.parametrize(("wrap", "plan"), CASES)
def test_graphs_are_compiled_in_the_first_step_alone(results: list[dict[Any, Any]], wrap: str, plan: str) -> None:
    for process in results:
        compiled = process[wrap, plan]["compiled"]
        assert 0 < compiled[0] == compiled[-1]


@pytest.mark.parametrize("wrap", ["ddp first", "fsdp2"])
def test_graphs_pack_in_several_processes(results: list[dict[Any, Any]], wrap: str) -> None:
    """DDP splits the graph at its buckets, FSDP2 breaks it between layers; each part packs what only it holds."""
    found = results[0][wrap, "int8"]
    assert found["graphs"] > 1
    assert len(set(found["stored"])) == 1 and found["stored"][0] > PACKED_BYTES
    assert {"layers.0.mlp.1:input", "layers.0.attention:scaled_dot_product_attention.query"} <= found["packed"]
    unmodified = [reason for _, given, reason in found["changes"] if given == "unmodified"]
    assert unmodified and all("caller" in reason for reason in unmodified)


def with_kernels(rank: int, folder: Path) -> dict[Any, Any]:
    """Three steps in bf16 autocast in 4 bits, by kernels of Inductor."""
    found: dict[Any, Any] = {}
    for wrap in ("ddp", "fsdp2"):
        for plan in (None, Plan.uniform(activation=INT4)):
            torch._dynamo.reset()
            with inductor_config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
                found[wrap, plan is not None] = steps(WRAPS[wrap], plan, rank, in_bf16=True)
    return found


@pytest.mark.full
def test_kernels_of_inductor_in_two_processes(tmp_path: Path) -> None:
    for process in run_on_two(with_kernels, tmp_path):
        for wrap in ("ddp", "fsdp2"):
            assert_near(process[wrap, True], process[wrap, False], least=1e-3, most=0.3)
            assert process[wrap, True]["compiled"][0] == process[wrap, True]["compiled"][-1]
