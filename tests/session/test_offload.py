"""Packed activations in host memory: gradients, the order of copies, and the predicted bytes.

On a CPU the copies are made at once, which tests all but the streams; tests with the marker `gpu` run on a GPU.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paredown import Plan, Role, apply, footprint, trace_step
from paredown.errors import PlanError
from paredown.optim.sharded.local_rows import local
from paredown.plan.explanation import explain_slots
from paredown.plan.plan import CHECKPOINT_INPUTS
from paredown.plan.planned_step import IN_GRAPHS, NOT_CUDA, NOT_PACKED, READ_FIRST
from paredown.session.eager import host_memory
from paredown.session.eager.host_memory import CAPTURED, HostCopies
from paredown.session.eager.stored_tensors import StoredValues
from paredown.study.sweeps.plan_labels import plan_label
from paredown.study.sweeps.sweep import TrialSpec
from tests.session.nets import INT8
from tests.session.test_second_passes import BY_MODEL, NONE, ROWS, WIDTH, Stack, assert_equal, batch, gradients
from tests.support.processes import needs_gloo, run_on_two

INPUTS = Plan().set("activation=*:checkpoint.input", INT8)
EIGHT_BITS = ROWS * WIDTH + ROWS * WIDTH // 64 * 2


class Layer(nn.Module):
    """A pre-norm MLP: what its first linear layer saves is recomputed from the input of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Layers(nn.Module):
    """Five layers without checkpoints."""

    def __init__(self, num: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PACKED = Plan.uniform(activation=INT8)
NETWORKS: dict[str, tuple[Any, Plan, tuple[str, ...]]] = {
    "inputs of checkpoints of the model": (lambda: Stack(BY_MODEL), INPUTS, ()),
    "inputs of checkpoints of the plan": (lambda: Stack(NONE), INPUTS.recomputing("layers.*"), ()),
    "all packed activations": (Layers, PACKED, ("*",)),
    "norms, from which others are recomputed": (Layers, PACKED, ("layers.*.norm:input",)),
    "beside a checkpointed layer": (Layers, PACKED.recomputing("layers.1"), ("layers.*",)),
    "two layers": (Layers, PACKED, ("layers.0.*", "layers.2.*")),
}
by_network = pytest.mark.parametrize(("make", "plan", "slots"), NETWORKS.values(), ids=NETWORKS)


@pytest.fixture
def offloads_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "OFFLOADING_DEVICES", ("cpu", "cuda"))


def stored_after_forward(model: nn.Module, plan: Plan, x: Tensor) -> tuple[int, int]:
    """Bytes of packed activations on the device and in host memory when backward begins."""
    with apply(plan, model) as session:
        loss = model(x)
        found = session.stored_bytes, session.host_bytes
        loss.backward()
        assert session.host_bytes == 0, "the graph is freed"
        return found


def check_gradients(model: nn.Module, plan: Plan, x: Tensor, expected: list[Tensor]) -> None:
    with apply(plan, model) as session:
        for _ in range(3):
            assert_equal(gradients(model, x), expected)
        loss = model(x)
        for _ in range(2):  # a retained graph reads them twice
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert_equal(list(found), expected)
        losses = [model(x), model(x)]  # two graphs at once
        for loss in losses:
            assert_equal(list(torch.autograd.grad(loss, list(model.parameters()))), expected)
        assert not any(row.asked == "offload" for row in session.changes)


@pytest.mark.usefixtures("offloads_on_a_cpu")
@by_network
def test_gradients_are_those_without_offload(make: Any, plan: Plan, slots: tuple[str, ...]) -> None:
    with apply(plan, model := make()):
        expected = gradients(model, batch())
    check_gradients(make(), plan.offloading(*slots), batch(), expected)


@pytest.mark.usefixtures("offloads_on_a_cpu")
@by_network
def test_predicted_bytes_are_stored_bytes(make: Any, plan: Plan, slots: tuple[str, ...]) -> None:
    """Masks and unmodified tensors differ between devices, so that those on the GPU are compared with those of the plan without offload."""
    moving, trace = plan.offloading(*slots), trace_step(make(), (batch(),), device="cuda")
    before, after = (footprint(trace, one) for one in (plan, moving))
    (without, nothing), (stored, on_host) = (stored_after_forward(make(), one, batch()) for one in (plan, moving))
    freed = before.by_role[Role.ACTIVATION] - after.by_role[Role.ACTIVATION]
    assert (nothing, before.host_bytes) == (0, 0) and on_host == after.host_bytes > 0
    assert without - stored == freed > 0 and after.peak_bytes <= before.peak_bytes
    assert any(row.why.endswith("in host memory until backward needs it") for row in explain_slots(trace, moving))
    assert "in host memory: packed activations" in repr(after) and not any("host" in note for note in after.notes)


@pytest.mark.usefixtures("offloads_on_a_cpu")
def test_each_layer_is_fetched_while_the_layer_after_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    counts = {"to_host": 0, "to_device": 0}
    numbers: dict[int, int] = {}  # of a layer's first copy in host memory

    def noted(name: str) -> Any:
        original = getattr(HostCopies, name)

        def copy(self: HostCopies, sources: list[Any], device: torch.device) -> Any:
            copies, event = original(self, sources, device)
            key = id((copies if name == "to_host" else sources)[0])
            numbers.setdefault(key, len(numbers))
            events.append(f"{name} {numbers[key]}")
            counts[name] += len(sources)
            return copies, event

        return copy

    for name in counts:
        monkeypatch.setattr(HostCopies, name, noted(name))
    with apply(PACKED.offloading("layers.*"), model := Layers()):
        for number, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, number=number: events.append(f"computed {number}"))
            layer.register_full_backward_hook(lambda *_, number=number: events.append(f"backward {number}"))
        loss = model(batch())
        assert events.index("to_host 0") > events.index("computed 0") and events.index("to_host 0") < events.index("computed 1")
        assert [event for event in events if "to_" in event] == [f"to_host {number}" for number in range(5)]
        events.clear()
        loss.backward()
    assert counts == {"to_host": 10, "to_device": 8}, (
        "two tensors of each layer; the last one stays, and its output is the last layer"
    )
    order = [event for number in (4, 3, 2, 1) for event in (f"to_device {number - 1}", f"backward {number}")]
    assert events == [*order, "backward 0"]


@pytest.mark.usefixtures("offloads_on_a_cpu")
def test_without_pinned_memory_whole_layers_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    to_host, calls = HostCopies.to_host, list[int]()

    def limited(self: HostCopies, stored: list[Any], device: torch.device) -> Any:
        calls.append(len(stored))
        if len(calls) > 2:
            raise MemoryError(host_memory.NOT_PINNED.format("out of memory"))
        return to_host(self, stored, device)

    with apply(PACKED, model := Layers()):
        expected = gradients(model, batch())
    monkeypatch.setattr(HostCopies, "to_host", limited)
    with apply(PACKED.offloading("layers.*"), model := Layers()) as session:
        loss = model(batch())
        assert session.host_bytes == footprint(trace_step(Layers(2), (batch(),), device="cuda"), session.plan).host_bytes
        assert_equal(list(torch.autograd.grad(loss, list(model.parameters()))), expected)
        assert_equal(gradients(model, batch()), expected)
        (row,) = [row for row in session.changes if row.asked == "offload"]
    assert row.reason == "pinned host memory cannot be allocated: out of memory" and row.slot == "layers.*"
    assert calls == [2, 2, 2], "it is not tried again"


def test_rows_where_nothing_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.uniform(activation=INT8).offloading()
    for model, of, reason in ((Stack(BY_MODEL), INPUTS.offloading(), NOT_CUDA), (Stack(NONE), plan, NOT_CUDA)):
        with apply(of, model) as session:
            gradients(model, batch())
            assert [row.reason for row in session.changes if row.asked == "offload"] == [reason]
            assert session.host_bytes == 0 and "in host memory" not in repr(session.summary().stored[0])
    monkeypatch.setattr(host_memory, "OFFLOADING_DEVICES", ("cpu",))
    with apply(PACKED.offloading(":pow.*", "layers.0.*", "nothing:input"), model := Layers()) as session:
        gradients(model, batch())
        rows = {row.slot: row.reason for row in session.changes if row.asked == "offload"}
        assert rows == {":pow.*": READ_FIRST, "nothing:input": NOT_PACKED}
        assert "in host memory" in str(session.summary().stored[0])


def test_a_captured_step_says_that_it_offloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before the capture have moved the slots."""
    monkeypatch.setattr(host_memory, "OFFLOADING_DEVICES", ("cpu",))
    with apply(PACKED.offloading("layers.*"), model := Layers()) as session:
        gradients(model, batch())
        assert not [row for row in session.changes if row.asked == "offload"]
        monkeypatch.setattr(host_memory, "is_capturing", lambda: True)
        loss = model(batch())
        assert session.host_bytes == 0
        loss.backward()
        assert [(row.slot, row.reason) for row in session.changes if row.asked == "offload"] == [("layers.*", CAPTURED)]


class Shared(nn.Module):
    """Three layers that save the same input, and two after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.q, self.k, self.v, self.up, self.down = (nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        return self.down(self.up(self.q(x) + self.k(x) * self.v(x)).tanh()).square().mean()


@pytest.mark.usefixtures("offloads_on_a_cpu")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_of_several_slots_are_moved_by_the_name_of_any(name: str) -> None:
    with apply(PACKED.offloading(f"{name}:input"), model := Shared()) as session:
        loss = model(torch.randn(128, 64))
        assert session.host_bytes > 0
        loss.backward()
        assert not [row for row in session.changes if row.asked == "offload"]


def test_compiled_sessions_refuse_it() -> None:
    with apply(PACKED.offloading("layers.*"), model := Layers(2)) as session:
        session.compile()(batch()).backward()
        assert [(row.slot, row.reason) for row in session.changes if row.asked == "offload"] == [("layers.*", IN_GRAPHS)]
        assert model is session.model


def test_predictions_say_what_is_not_moved() -> None:
    on_cpu, on_gpu = (trace_step(Stack(BY_MODEL), (batch(),), device=device) for device in ("cpu", "cuda"))
    foot = footprint(on_cpu, INPUTS.offloading())
    assert foot.host_bytes == 0 and foot.peak_bytes == footprint(on_cpu, INPUTS).peak_bytes
    assert f"{CHECKPOINT_INPUTS[0]} is not in host memory: {NOT_CUDA}" in foot.notes
    for plan in (Plan.uniform(), Plan.uniform(frozen=INT8)):
        foot = footprint(on_gpu, plan.offloading())
        assert foot.peak_bytes == footprint(on_gpu, plan).peak_bytes and foot.host_bytes == 0
        assert f"{CHECKPOINT_INPUTS[0]} is not in host memory: {NOT_PACKED}" in foot.notes


def test_plans_print_compare_and_save_it(tmp_path: Path) -> None:
    plan, named = INPUTS.offloading(), INPUTS.offloading("layers.*", "head:input")
    assert len({plan, named, INPUTS}) == len({plan.key, named.key, INPUTS.key}) == 3
    for one in (plan, named):
        assert "in host memory" in repr(one) and "in host memory" in one.explain() and "in host memory" in repr(INPUTS.diff(one))
        one.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == one
    assert "offload" not in INPUTS.to_json()
    assert (plan.to_json()["version"], plan.to_json()["offload"]) == (2, True), "as before there were other slots"
    assert (named.to_json()["version"], named.to_json()["offload"]) == (5, ["layers.*", "head:input"])
    assert Plan.from_json({**INPUTS.to_json(), "offload": False}) == INPUTS
    with pytest.raises(PlanError, match=r"a list of slots by name or pattern, such as .* not 'yes'"):
        Plan.from_json({**INPUTS.to_json(), "offload": "yes"})


def test_other_parts_name_it() -> None:
    """Keys of trials differ, those of plans without offload do not change; labels and simulate mode say it."""
    plans = [INPUTS, INPUTS.offloading(), INPUTS.offloading("layers.*")]
    assert len({TrialSpec("task", plan, 0).key("sweep") for plan in plans}) == 3
    assert plan_label(plans[1]).endswith(", offloaded") and "offloaded" not in plan_label(INPUTS)
    assert plan_label(plans[2]).endswith("layers.* offloaded")
    with apply(Plan.uniform(activation=INT8).offloading(), Stack(NONE), mode="simulate") as session:
        assert [row.given for row in session.changes if row.slot == CHECKPOINT_INPUTS[0]] == ["unmodified"]


def of_two_processes(rank: int, folder: Path) -> list[tuple[bool, int]]:
    """Of DDP and of fully_shard: whether the gradients are those without offload, and the bytes in host memory."""
    host_memory.OFFLOADING_DEVICES = ("cpu",)
    found: list[tuple[bool, int]] = []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    for wrap in (DistributedDataParallel, fully_shard):
        gradients_of: list[list[Tensor]] = []
        for plan in (PACKED, PACKED.offloading("layers.*")):
            model: Any = wrap(Layers())
            with apply(plan, model) as session:
                loss = model(x)
                on_host = session.host_bytes
                loss.backward()
                assert not any(row.asked == "offload" for row in session.changes)
                gradients_of.append([local(p.grad) for p in model.parameters()])
        found.append((all(map(torch.equal, *gradients_of)), on_host))
    return found


@needs_gloo
@pytest.mark.filterwarnings("ignore")
def test_several_processes_offload_their_own_activations(tmp_path: Path) -> None:
    expected = footprint(trace_step(Layers(), (batch(),), device="cuda"), PACKED.offloading("layers.*")).host_bytes
    assert run_on_two(of_two_processes, tmp_path) == [[(True, expected), (True, expected)]] * 2


@pytest.mark.gpu
@by_network
def test_gradients_on_a_gpu(make: Any, plan: Plan, slots: tuple[str, ...]) -> None:
    x = batch().cuda()
    with apply(plan, model := make().cuda()):
        expected = gradients(model, x)
    check_gradients(make().cuda(), plan.offloading(*slots), x, expected)


@pytest.mark.gpu
@by_network
def test_predicted_bytes_on_a_gpu(make: Any, plan: Plan, slots: tuple[str, ...]) -> None:
    x, moving = batch().cuda(), plan.offloading(*slots)
    trace = trace_step(make().cuda(), (x,), device="cuda")
    freed = footprint(trace, plan).by_role[Role.ACTIVATION] - footprint(trace, moving).by_role[Role.ACTIVATION]
    (without, nothing), (stored, on_host) = (stored_after_forward(make().cuda(), one, x) for one in (plan, moving))
    assert (nothing, on_host) == (0, footprint(trace, moving).host_bytes) and without - stored == freed


def requested_bytes() -> int:
    """The bytes of all CUDA tensors, without what the allocator adds to them when it gives them a larger block."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.gpu
def test_host_memory_is_pinned_and_gpu_memory_is_freed() -> None:
    """After forward, the memory of the layers that were moved is free on the GPU, and their copies are in pinned memory."""
    x = torch.randn(1 << 14, WIDTH, device="cuda")
    allocated: list[int] = []
    for plan in (PACKED, PACKED.offloading("layers.*")):
        with apply(plan, model := Layers().cuda()) as session:
            gradients(model, x)  # the second step has all kernels
            before = requested_bytes()
            loss = model(x)
            allocated.append(requested_bytes() - before)
            forms = [form for form in session._activations.stored_forms() if type(form) is StoredValues and form.host is not None]
            copies = [form.host.on_host for form in forms if form.host.nbytes]  # type: ignore[union-attr]
            away = [form.codec.nbytes for form in forms if form.stored is None]
            assert all(piece.is_pinned() for one in copies for of_part in one.pieces for piece in of_part)
            loss.backward()
    assert (len(copies), len(away)) == (10, 8), "two tensors of each layer, and those of the last one are on the GPU too"
    assert sum(away) <= allocated[0] - allocated[1] <= 1.05 * sum(away)
