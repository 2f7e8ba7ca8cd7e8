"""fully_shard with weights, gradients and moments packed, in four gloo processes: the codes of one process, memory and traffic as
`footprint` predicts, and checkpoints that other numbers of processes load."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import ProcessExitedException

import paredown
from paredown import footprint, trace_step
from paredown.codec.packed import encode
from paredown.errors import OptimError
from paredown.formats.format import Format
from paredown.formats.rounding import Rounding, Seed
from paredown.models.transformer import token_loss
from paredown.optim import AdamW, reduce_in_8_bits
from paredown.optim.gradient_ops import PackedGradient
from paredown.optim.packed_weight import weight_of
from paredown.optim.sharded.local_rows import local
from paredown.optim.sharded.packed_shards import NEEDED, reason_to_keep_shard_plain
from paredown.optim.sharded.reduction import SUM_IDS, Reduction, reduce_bucket
from paredown.plan.trace import Trace
from tests.session import sharded as of
from tests.support.processes import needs_gloo, run_on, run_on_two

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore")]  # of the libraries below, about this machine
WORLD = 4
IN_8_BITS = Format.parse("int8/64@bf16")


def codes_of_pictures() -> dict[str, Any]:
    model = of.sharded(of.Pictures())
    session, optimizer = of.with_given_gradients(model)
    found = {"codes": of.codes_of(optimizer), "changes": [(row.slot, row.given, row.reason) for row in session.changes]}
    session.close()
    return {**found, "closed": [local(p).detach() for p in model.parameters()], "runs": model(of.pictures(0)).isfinite().all()}


def without_sums(codes: of.Codes) -> of.Codes:
    """Without sums of gradients, which are complete at the end of a step and are not saved."""
    return [{name: value for name, value in state.items() if not name.startswith("gradient.")} for state in codes]


def training(rank: int, folder: Path, network: str = "gpt") -> dict[str, Any]:
    """Losses, stored and sent bytes; a checkpoint after two steps, from which a second run continues."""
    model, session, optimizer = of.started(network=network)
    losses = of.train(model, optimizer, rank, range(2))
    of.save(str(folder / "checkpoint"), model, optimizer)
    saved = without_sums(of.codes_of(optimizer))
    with of.counted() as sent:
        of.loss_of(model, 200 + rank).backward()
    nbytes = of.stored_in_process(model, optimizer)
    optimizer.zero_grad()
    later = of.train(model, optimizer, rank, range(2, 4))
    found = {"losses": losses, "saved": saved, "sent": sent, "stored": nbytes, "later": later, "codes": of.codes_of(optimizer)}
    session.close()
    model, session, optimizer = of.started(network=network)
    of.load(str(folder / "checkpoint"), model, optimizer)
    of.loss_of(model, 200 + rank).backward()  # the number of gradients selects random bits
    optimizer.zero_grad()
    again = {"loaded": without_sums(of.codes_of(optimizer))}
    again |= {"later again": of.train(model, optimizer, rank, range(2, 4)), "codes again": of.codes_of(optimizer)}
    return {**found, **again}


def replicas(rank: int) -> list[float]:
    """Losses of one step of four replicas: a mesh of shape (4, 1)."""
    model = of.sharded(of.gpt(), WORLD, 1)
    with pytest.raises(OptimError, match="over replicas only"):
        reduce_in_8_bits(model)
    paredown.apply(of.LPMM, model)
    return of.train(model, AdamW(model.parameters(), lr=0.01), rank, range(2))


def layer(*, value: float = 0.0) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(64, 128)
    made.weight.data[-1, 0] += value
    return made


def kept_plain(rank: int) -> dict[str, list[str]]:
    """Why the weight of a layer is not packed, by the way in which it is sharded; empty where it is."""
    mesh = init_device_mesh("cpu", (WORLD,))
    ways: dict[str, Any] = {
        "partly": fully_shard(layer(), mesh=mesh, reshard_after_forward=2),
        "offloaded": fully_shard(layer(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "columns": fully_shard(layer(), mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None),
        "infinite": fully_shard(layer(value=math.inf), mesh=mesh),  # in the rows of the last process alone
        "by hand": by_hand(mesh),
        "gathered": fully_shard(layer(), mesh=mesh, reshard_after_forward=False),
    }
    with torch.no_grad():
        ways["gathered"](torch.ones(1, 64))  # without backward, its parameters stay whole
    found: dict[str, list[str]] = {}
    for way, model in ways.items():
        session = paredown.apply(of.LPMM.set("bias", None), model)
        found[way] = [row.reason for row in session.changes if row.slot == "weight=weight"]
        if way != "by hand":  # which takes DTensors
            model(torch.ones(1, 64))
            assert [row.reason for row in session.changes if row.slot == "weight=weight"] == found[way], (
                "while parameters are whole"
            )
        session.close()
    return found


def by_hand(mesh: Any) -> nn.Linear:
    made = layer()
    made.weight = nn.Parameter(distribute_tensor(made.weight.data, mesh, [Shard(0)]))
    return made


def replaced(rank: int) -> list[bool]:
    """Whether a weight is packed after load_state_dict(assign=True) has replaced its parameter, and has its values."""
    model = fully_shard(layer(), mesh=init_device_mesh("cpu", (WORLD,)))
    session = paredown.apply(of.LPMM, model)
    model(torch.ones(1, 64)).sum().backward()
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    expected = 2 * paredown.round_trip(layer().weight.detach(), "int8/64@e8m0")
    is_packed = weight_of(model.weight) is not None
    output = model(torch.eye(64))
    session.close()
    return [is_packed, torch.equal(local(model.weight), expected[32 * rank : 32 * rank + 32]), bool(output.isfinite().all())]


def gradients(rank: int, microbatches: int) -> list[Tensor]:
    """Decoded rows of the gradients of this process after as many backward passes of one batch."""
    model = of.sharded(of.gpt())
    paredown.apply(of.LPMM, model)
    optimizer = AdamW(model.parameters(), microbatches=microbatches)
    for _ in range(microbatches):
        ids, targets = of.texts(rank)
        token_loss(model(ids), targets).backward()
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    assert {type(grad) for grad in grads} == {Tensor, PackedGradient} and optimizer.updates == 0
    is_mean = [isinstance(grad, PackedGradient) or microbatches == 1 for grad in grads]  # plain ones are sums until the step
    return [grad.clone() if mean else grad / microbatches for grad, mean in zip(grads, is_mean, strict=True)]


def reduced(rank: int) -> Tensor:
    """A bucket of DistributedDataParallel after a reduction in 8 bits."""
    values = of.gradient_of(rank)
    bucket = SimpleNamespace(buffer=lambda: values, index=lambda: 3)
    return reduce_bucket(Reduction(IN_8_BITS, seed=5), dist.group.WORLD, bucket).value()


def sent_in(rank: int, dtype: torch.dtype | None) -> dict[str, int]:
    """Bytes of the collectives of a pass with gradients reduced in `dtype`."""
    mesh, model = init_device_mesh("cpu", (WORLD,)), of.gpt()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    session = paredown.apply(of.LPMM, model)
    with of.counted() as sent:
        of.loss_of(model, rank).backward()
    session.close()
    return sent


def worker(rank: int, folder: Path) -> dict[str, Any]:
    edges = {"plain": kept_plain(rank), "replaced": replaced(rank), "reduced": reduced(rank)}
    edges["sent"] = [sent_in(rank, dtype) for dtype in (None, torch.bfloat16)]
    edges["gradients"] = {number: gradients(rank, number) for number in (1, 2)}
    return {**edges, "pictures": codes_of_pictures(), "training": training(rank, folder), "replicas": replicas(rank)}


def on_two(rank: int, folder: Path, network: str = "gpt") -> dict[str, of.Codes]:
    """The codes of a checkpoint of four processes, and those after three steps with given gradients."""
    model, _, optimizer = of.started(network=network)
    of.load(str(folder / "checkpoint"), model, optimizer)
    return {"loaded": of.codes_of(optimizer), "given": codes_of_pictures()["codes"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return run_on(WORLD, worker, folder)


def assert_equal_codes(found: of.Codes, expected: of.Codes) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), [name for name in a if not torch.equal(a[name], b[name])]


def test_codes_are_those_of_one_process(four: list[dict[str, Any]]) -> None:
    model = of.Pictures()
    session, optimizer = of.with_given_gradients(model)
    expected = of.codes_of(optimizer)
    assert any("gradient.codes" in state for state in expected) and any("weight.codes" in state for state in expected)
    assert_equal_codes(of.joined([process["pictures"]["codes"] for process in four]), expected)
    session.close()
    for i, mine in enumerate(model.parameters()):
        assert torch.equal(mine, torch.cat([process["pictures"]["closed"][i] for process in four]))
    assert all(process["pictures"]["runs"] for process in four)


def test_padding_has_a_row(four: list[dict[str, Any]]) -> None:
    padded = {slot: reason for slot, given, reason in four[0]["pictures"]["changes"] if given == "packed and padded"}
    assert set(padded) == {"weight=ten.weight", "weight=five.weight"}
    assert "(10)" in padded["weight=ten.weight"] and "2 rows of zeros in all" in padded["weight=ten.weight"]
    assert "(5)" in padded["weight=five.weight"] and "3 rows of zeros in all" in padded["weight=five.weight"]


def test_what_stays_plain_has_a_reason_in_all_processes(four: list[dict[str, Any]]) -> None:
    expected = {
        "partly": "reshard_after_forward is an integer",
        "offloaded": "CPUOffloadPolicy",
        "columns": "only dimension 0",
        "infinite": "not finite",
        "by hand": "fully_shard does not manage",
    }
    for process in four:
        assert not process["plain"].pop("gathered")
        for way, text in expected.items():
            assert len(process["plain"][way]) == 1 and text in process["plain"][way][0], (way, process["plain"][way])


def test_a_torch_without_the_attributes_has_a_reason() -> None:
    managed = SimpleNamespace(**dict.fromkeys(NEEDED[:-1]))
    reason = reason_to_keep_shard_plain(SimpleNamespace(), managed, Format.parse("int8/64@bf16"))  # type: ignore[arg-type]
    assert reason is not None and torch.__version__ in reason and NEEDED[-1] in reason


def test_replaced_parameters_are_packed_again(four: list[dict[str, Any]]) -> None:
    assert all(process["replaced"] == [True, True, True] for process in four)


def test_gradients_are_means_over_processes_and_microbatches(four: list[dict[str, Any]]) -> None:
    model = of.gpt()
    session = paredown.apply(paredown.Plan.uniform(weight="int8/64@e8m0"), model)
    torch.stack([token_loss(model(ids), targets) for ids, targets in map(of.texts, range(WORLD))]).mean().backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    session.close()
    for number in (1, 2):
        rows = zip(*(process["gradients"][number] for process in four), strict=True)
        found = torch.cat([torch.cat(parts).flatten() for parts in rows])
        assert 1e-4 < (found - exact).norm() / exact.norm() < 0.02, "rounded to 8 bits once or twice"


def test_gradients_are_reduced_in_the_dtype_of_the_policy(four: list[dict[str, Any]]) -> None:
    for process in four:
        unmodified, half = process["sent"]
        assert half == {"all_gather": unmodified["all_gather"], "reduce_scatter": unmodified["reduce_scatter"] // 2}


def test_random_bits_of_a_reduction_follow_from_the_index_in_the_whole_buffer(four: list[dict[str, Any]]) -> None:
    """The quantized sum is that of a buffer that is not divided, so it does not depend on the number of processes."""
    mean = torch.stack([of.gradient_of(rank) for rank in range(WORLD)]).sum(0)[None] / WORLD
    seed = Seed(5, SUM_IDS + 3, 1)
    expected = encode(mean, IN_8_BITS, rounding=Rounding.STOCHASTIC, seed=seed, order="logical").decode()[0]
    assert all(torch.equal(process["reduced"], expected) for process in four)
    assert not torch.equal(expected, mean[0]) and not torch.equal(expected, paredown.round_trip(mean, IN_8_BITS)[0])


def test_losses_are_those_of_one_process(four: list[dict[str, Any]]) -> None:
    """Those of the first step to rounding, as weights are decoded from the same codes; later ones differ by flipped codes."""
    model = of.gpt()
    session = paredown.apply(of.LPMM, model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        for part in range(2):
            losses = [
                token_loss(model(ids), targets) for ids, targets in (of.texts(100 * step + 10 * part + r) for r in range(WORLD))
            ]
            torch.stack(losses).mean().backward()
            found = torch.tensor([process["training"]["losses"][2 * step + part] for process in four])
            expected = torch.stack(losses).detach()
            assert torch.allclose(found, expected, rtol=5e-3 if step else 1e-5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    session.close()


def test_replicas_have_the_losses_of_shards(four: list[dict[str, Any]]) -> None:
    for process in four:
        losses, expected = process["replicas"], process["training"]["losses"]
        assert losses[:2] == expected[:2] and torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-3)


def stored_in_one_process(network: str) -> int:
    model = of.NETWORKS[network]()
    session = paredown.apply(of.LPMM, model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    of.train(model, optimizer, 0, range(1))
    of.loss_of(model, 200).backward()
    nbytes = of.stored_in_process(model, optimizer)
    session.close()
    return nbytes


def check_memory_and_traffic(processes: list[dict[str, Any]], network: str, trace: Trace) -> None:
    foot, alone = footprint(trace, of.LPMM, world_size=WORLD, strategy="fsdp2"), footprint(trace, of.LPMM)
    assert processes[0]["stored"] == foot.model_bytes
    divided = stored_in_one_process(network) / WORLD
    assert abs(processes[0]["stored"] - foot.padding_bytes - foot.wide_bytes - divided) < 0.05 * divided
    assert foot.wide_bytes == 0 and alone.model_bytes == stored_in_one_process(network)
    for process in processes:
        assert (WORLD - 1) * process["sent"]["all_gather"] == foot.communication.all_gather
        assert (WORLD - 1) * process["sent"]["reduce_scatter"] == foot.communication.reduce_scatter
    plain = footprint(trace, world_size=WORLD, strategy="fsdp2").communication
    assert foot.communication.all_gather < 0.3 * plain.all_gather and foot.communication.reduce_scatter == plain.reduce_scatter


def check_resumed(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert_equal_codes(
            found["loaded"], [{**state, "folds": state["folds"] + 1} if "folds" in state else state for state in found["saved"]]
        )
        assert found["later again"] == found["later"]
        assert_equal_codes(found["codes again"], found["codes"])


def check_fewer_processes(processes: list[dict[str, Any]], network: str, checkpoint: Path, folder: Path) -> None:
    saved = of.joined([process["saved"] for process in processes])
    (folder / "checkpoint").symlink_to(checkpoint)
    two = run_on_two(partial(on_two, network=network), folder)
    assert_equal_codes(without_sums(of.joined([process["loaded"] for process in two])), saved)
    assert_equal_codes(of.joined([process["given"] for process in two]), codes_in_one_process())
    model = of.NETWORKS[network]()
    paredown.apply(of.LPMM, model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    of.load(str(checkpoint), model, optimizer, no_dist=True)
    assert_equal_codes(without_sums(of.codes_of(optimizer)), saved)


def codes_in_one_process() -> of.Codes:
    session, optimizer = of.with_given_gradients(of.Pictures())
    codes = of.codes_of(optimizer)
    session.close()
    return codes


def test_memory_and_traffic_are_as_predicted(four: list[dict[str, Any]]) -> None:
    trace = trace_step(of.gpt(), of.texts(0), loss=token_loss, optimizer="adamw", device="cpu")
    check_memory_and_traffic([process["training"] for process in four], "gpt", trace)


def test_a_run_that_is_loaded_continues_with_the_same_bits(four: list[dict[str, Any]]) -> None:
    check_resumed([process["training"] for process in four])


def test_one_and_two_processes_load_the_same_codes(four: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    check_fewer_processes([process["training"] for process in four], "gpt", folder / "checkpoint", tmp_path)


@pytest.mark.full
def test_all_of_it_on_a_convolutional_network(tmp_path: Path) -> None:
    (tmp_path / "four").mkdir()
    processes = run_on(WORLD, partial(training, network="pictures"), tmp_path / "four")
    batch = of.pictures(0), torch.arange(4)
    trace = trace_step(of.Pictures(), batch, loss=nn.functional.cross_entropy, optimizer="adamw", device="cpu")
    check_memory_and_traffic(processes, "pictures", trace)
    check_resumed(processes)
    check_fewer_processes(processes, "pictures", tmp_path / "four" / "checkpoint", tmp_path)


# --- more ways to train, in make test-all -----------------------------------------------------------------------------------


def way(rank: int, name: str) -> list[float]:
    """Losses of three steps under a plan for everything, trained in the way called `name`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if name == "replicas" else None
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if name == "mixed" else MixedPrecisionPolicy()
    )
    model = of.gpt()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh or init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
    paredown.apply(of.EVERYTHING.recomputing("layers.*") if name == "checkpointed" else of.LPMM, model)
    reduction = reduce_in_8_bits(model) if name == "in 8 bits" else None
    options = {"released": {"release": True}, "microbatches": {"microbatches": 2}}.get(name, {})
    optimizer = AdamW(model.parameters(), lr=0.01, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=name == "scaled")
    losses: list[float] = []
    for step in range(6 if name == "microbatches" else 3):
        ids, targets = of.texts(10 * (step // 2 if name == "microbatches" else step) + rank)
        loss = token_loss(model(ids), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item()] if name != "microbatches" or step % 2 == 0 else []
    assert reduction is None or set(reduction.counts.values()) == {3}
    return losses


WAYS = {
    "plain": 0.0,
    "replicas": 1e-3,
    "mixed": 1e-2,
    "checkpointed": 1e-2,
    "in 8 bits": 1e-2,
    "released": 5e-3,
    "microbatches": 5e-3,
    "scaled": 5e-3,
}


def ways(rank: int, folder: Path) -> dict[str, list[float]]:
    return {name: way(rank, name) for name in WAYS}


@pytest.mark.full
def test_ways_to_train_have_close_losses(tmp_path: Path) -> None:
    """Tolerances are relative, for three steps of the same batches: sums in another order, bf16, or other random bits."""
    for process in run_on(WORLD, ways, tmp_path):
        expected = torch.tensor(process["plain"])
        for name, tolerance in WAYS.items():
            assert torch.allclose(torch.tensor(process[name]), expected, rtol=tolerance), (name, process[name], expected)


# --- a process that is killed ---------------------------------------------------------------------------------------------


def run(rank: int, folder: Path, *, network: str, dies: bool) -> list[float]:
    """Six steps with a checkpoint after every second one, from the last checkpoint on; with `dies`, one process is killed in step 5."""
    model, session, optimizer = of.started(of.EVERYTHING, network)
    first = max((int(path.name) for path in folder.glob("[0-9]") if (path / ".metadata").exists()), default=0)
    if first:
        of.load(str(folder / str(first)), model, optimizer)
        session.load_state_dict(torch.load(folder / f"session{first}", weights_only=False))
    losses: list[float] = []
    for step in range(first, 6):
        if dies and rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        losses += of.train(model, optimizer, rank, range(step, step + 1))
        if step % 2:
            of.save(str(folder / str(step + 1)), model, optimizer)
            if rank == 0:
                torch.save(session.state_dict(), folder / f"session{step + 1}")
    return losses


@pytest.mark.full
@pytest.mark.parametrize(("num_processes", "network"), [(2, "gpt"), (4, "gpt"), (4, "pictures")])
def test_a_killed_process_and_a_resumed_run_have_the_same_losses(num_processes: int, network: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = run_on(num_processes, partial(run, network=network, dies=False), whole)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_on(num_processes, partial(run, network=network, dies=True), broken)
    assert not (broken / "6").exists() and (broken / "4").exists()
    resumed = run_on(num_processes, partial(run, network=network, dies=False), broken)
    assert [losses[-4:] for losses in expected] == resumed  # two steps of two microbatches


def test_the_comparison_sees_one_code() -> None:
    codes: of.Codes = [{"weight.codes": torch.zeros(2, 3, dtype=torch.uint8)}]
    other = [{"weight.codes": torch.tensor([[0, 0, 0], [0, 1, 0]], dtype=torch.uint8)}]
    with pytest.raises(AssertionError):
        assert_equal_codes(codes, other)
