"""Packed inputs of checkpointed layers in host memory: gradients, the order of copies, and the predicted bytes.

On a CPU the copies are made at once, which tests all but the streams; `test_offload_on_a_gpu` runs on a GPU.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paredown import Plan, Role, apply, footprint, trace_step
from paredown.errors import PlanError
from paredown.session import checkpointing
from paredown.session.checkpointing import HostCopies, OffloadedValues
from paredown.study.sweeps.plan_labels import plan_label
from paredown.study.sweeps.sweep import TrialSpec
from tests.session.nets import INT8
from tests.session.test_second_passes import BY_MODEL, BY_PLAN, NONE, ROWS, WIDTH, Stack, assert_equal, batch, gradients

INPUTS = Plan().set("activation=*:checkpoint.input", INT8)
EIGHT_BITS = ROWS * WIDTH + ROWS * WIDTH // 64 * 2


@pytest.fixture
def offloads_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "OFFLOADING_DEVICES", ("cpu", "cuda"))


@pytest.mark.usefixtures("offloads_on_a_cpu")
@pytest.mark.parametrize("mode", [BY_MODEL, BY_PLAN])
def test_gradients_are_those_without_offload(mode: str) -> None:
    plan, x = INPUTS.recomputing("layers.*") if mode == BY_PLAN else INPUTS, batch()
    with apply(plan, model := Stack(mode)):
        expected = gradients(model, x)
    with apply(plan.offloading(), model := Stack(mode)) as session:
        for _ in range(2):
            assert_equal(gradients(model, x), expected)
        loss = model(x)
        for _ in range(2):  # a retained graph fetches them twice
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert_equal(list(found), expected)
        assert "offload" not in repr(session.changes)


@pytest.mark.usefixtures("offloads_on_a_cpu")
def test_each_input_is_fetched_while_the_layer_after_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}
    to_device, unpacked, to_host = HostCopies.to_device, OffloadedValues._unpacked, HostCopies.to_host

    def moved(self: HostCopies, packed: object) -> object:
        host = to_host(self, packed)  # type: ignore[arg-type]
        numbers[id(host)] = len(numbers)
        events.append(("stored", numbers[id(host)]))
        return host

    def fetched(self: HostCopies, host: object, device: torch.device) -> object:
        events.append(("fetched", numbers[id(host)]))
        return to_device(self, host, device)  # type: ignore[arg-type]

    def decoded(self: OffloadedValues) -> torch.Tensor:
        number = numbers[id(self._host)]
        result = unpacked(self)
        events.append(("decoded", number))
        return result

    monkeypatch.setattr(HostCopies, "to_host", moved)
    monkeypatch.setattr(HostCopies, "to_device", fetched)
    monkeypatch.setattr(OffloadedValues, "_unpacked", decoded)
    with apply(INPUTS.offloading(), model := Stack(BY_MODEL)) as session:
        loss = model(batch())
        assert session.stored_bytes == 0, "nothing of the inputs is on the device"
        loss.backward()
        assert session.stored_bytes == 0
    stored, rest = events[:3], events[3:]
    assert stored == [("stored", number) for number in range(3)]
    assert rest == [("fetched", 2), ("fetched", 1), ("decoded", 2), ("fetched", 0), ("decoded", 1), ("decoded", 0)]


def test_a_row_where_nothing_is_offloaded() -> None:
    for mode, reason in ((BY_MODEL, checkpointing.NO_GPU), (NONE, checkpointing.NO_INPUTS)):
        plan = INPUTS if mode == BY_MODEL else Plan.uniform(activation=INT8)
        with apply(plan.offloading(), model := Stack(mode)) as session:
            gradients(model, batch())
            assert [row.reason for row in session.changes if row.asked == "offload"] == [reason]


def test_predicted_bytes() -> None:
    """When backward begins no input is on the GPU."""
    trace = trace_step(Stack(BY_MODEL), (batch(),), device="cuda")
    stored = [footprint(trace, plan).by_role.get(Role.ACTIVATION, 0) for plan in (INPUTS, INPUTS.offloading())]
    inputs = [slot for slot in trace.activations if "checkpoint" in slot.name]
    assert stored[0] - stored[1] == len(inputs) * EIGHT_BITS > 0
    host = [footprint(trace, plan).host_bytes for plan in (INPUTS, INPUTS.offloading())]
    assert host == [0, len(inputs) * EIGHT_BITS] and "in host memory" in repr(footprint(trace, INPUTS.offloading()))
    on_cpu = trace_step(Stack(BY_MODEL), (batch(),), device="cpu")
    assert footprint(on_cpu, INPUTS.offloading()).host_bytes == 0
    assert footprint(on_cpu, INPUTS).peak_bytes == footprint(on_cpu, INPUTS.offloading()).peak_bytes


def test_plans_that_pack_no_input_are_predicted() -> None:
    trace = trace_step(Stack(BY_MODEL), (batch(),), device="cuda")
    for plan in (Plan.uniform(), Plan.uniform(frozen=INT8)):
        foot = footprint(trace, plan.offloading())
        assert foot.peak_bytes == footprint(trace, plan).peak_bytes and foot.host_bytes == 0


def test_plans_print_compare_and_save_it(tmp_path: Path) -> None:
    plan = INPUTS.offloading()
    assert plan != INPUTS and plan.key != INPUTS.key
    assert "host memory" in repr(plan) and "host memory" in plan.explain() and "host memory" in repr(INPUTS.diff(plan))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "offload" not in INPUTS.to_json()
    with pytest.raises(PlanError, match="true or false"):
        Plan.from_json({**INPUTS.to_json(), "offload": "yes"})


@pytest.mark.gpu
def test_offload_on_a_gpu() -> None:
    x = batch().cuda()
    with apply(INPUTS, model := Stack(BY_MODEL).cuda()):
        expected = gradients(model, x)
    with apply(INPUTS.offloading(), model := Stack(BY_MODEL).cuda()) as session:
        for _ in range(4):
            assert_equal(gradients(model, x), expected)
        loss = model(x)
        assert session.stored_bytes == 0
        loss.backward()


def test_other_parts_name_it() -> None:
    """Keys of trials differ, those of plans without offload do not change; labels and simulate mode say it."""
    plan, spec = INPUTS.offloading(), TrialSpec("task", INPUTS, 0)
    assert spec.key("sweep") != TrialSpec("task", plan, 0).key("sweep")
    assert plan_label(plan).endswith("offloaded") and "offloaded" not in plan_label(INPUTS)
    with apply(Plan.uniform(activation=INT8).offloading(), Stack(NONE), mode="simulate") as session:
        assert [row.given for row in session.changes if row.slot == "offload"] == ["unmodified"]
