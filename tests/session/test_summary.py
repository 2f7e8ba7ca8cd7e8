"""`session.summary()` and `repr(session)`: bytes against the baseline, peaks, and what is not stored as requested."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paredown import Plan, apply, footprint, optim, trace_step
from paredown.sizes import say_bytes
from tests.session.nets import INT4, INT8, Net, activations, rows


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd saves for backward, without parameters and the input: torch's own hooks see them."""
    others = {t.untyped_storage()._cdata for t in (x, *net.parameters())}
    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in others:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = net(x)
    assert output.grad_fn is not None
    return sum(storage.nbytes() for storage in storages.values())


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def test_activations_against_the_baseline() -> None:
    net = mlp()
    baseline = saved_bytes(net, rows(512))
    session = apply(activations(INT4), net)
    output = net(rows(512))
    stored = session.stored_bytes
    output = net(rows(128))  # the largest pass counts
    assert output.grad_fn is not None
    row = session.summary().stored[0]
    assert (row.name, row.stored, row.baseline) == ("activations", stored, baseline)
    assert 0 < stored < baseline / 4
    text = f"activations {say_bytes(stored)} instead of {say_bytes(baseline)}, {100 * stored / baseline:.0f} %"
    assert repr(session) == f"Session(Sequential, 2 forward passes, {text})"
    assert session.summary().lines()[0] == "Session of Sequential: 2 forward passes"


def test_the_share_of_packing_in_the_time_of_steps() -> None:
    """A clock that advances by 1 whenever it is read: the share follows from the number of readings."""
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))  # saves its input, and the input and output of GELU
    session = apply(activations(INT4), net)
    readings = count()
    session._activations.packing_time.clock = lambda: float(next(readings))
    net(rows(512)).sum().backward()
    assert session.summary().packing_share is None, "the first step is not complete"
    assert session.summary().lines()[0] == "Session of Sequential: 1 forward pass"
    net(rows(512))
    # one reading for the step; 2 tensors are packed, and unpacked, with 2 readings each, one of which is 1 after the other
    assert session.summary().packing_share == (2 + 2) / (1 + 2 * 2 + 2 * 2)
    assert session.summary().lines()[0] == "Session of Sequential: 2 forward passes, packing activations took 44 % of their time"
    with torch.no_grad():
        net(rows(512))
    net(rows(512))
    assert session.summary().packing_share == 4 / 9, "passes without backward do not count"


def test_originals_that_stay_alive_are_counted() -> None:
    """An output that the model returns is not packed, and a detached view keeps the memory of a packed tensor."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = functional.gelu(net.a(x))
        net.last = hidden.detach()[0]
        return torch.sigmoid(net.b(hidden))

    net = Net(forward)
    session = apply(activations(INT8), net)
    output = net(rows())
    plain = 128 * 64 * 4
    row = session.summary().stored[0]
    assert (row.stored, row.baseline) == (session.stored_bytes + 2 * plain, 3 * plain)  # gelu's input, b's input, the output
    assert output.grad_fn is not None


def test_weights_state_and_gradients_also_of_a_closed_session() -> None:
    net, x = mlp(), rows(512)
    trace = trace_step(net, (x, x), loss=functional.mse_loss, optimizer="adamw", device="cpu")
    plan = Plan.preset("lpmm").set("activation", INT4)
    session = apply(plan, net)
    optimizer = optim.AdamW(net.parameters())
    functional.mse_loss(net(x), x).backward()
    optimizer.step()
    found = session.summary(trace)
    plain = sum(p.numel() * 4 for p in net.parameters())
    rows_by_name = {row.name: row for row in found.stored}
    assert [*rows_by_name] == ["activations", "weights", "optimizer state", "gradients"]
    assert [row.baseline for row in found.stored[1:]] == [plain, 2 * plain, plain]
    small = sum(p.numel() * 4 for p in net.parameters() if p.dim() < 2)
    assert rows_by_name["weights"].stored == session.weight_bytes + small
    assert all(row.stored < 0.35 * row.baseline for row in found.stored[1:])
    peaks = [say_bytes(footprint(trace, p).peak_bytes) for p in (plan, None)]
    assert found.peak == f"{peaks[0]} predicted instead of {peaks[1]}"
    session.close()
    closed = session.summary(trace)
    assert (closed.stored, closed.changes, closed.state) == (found.stored, found.changes, "1 forward pass, closed")


def test_ten_lines_and_what_is_not_packed_comes_first() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    net = nn.Sequential(layer, nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(64 * 64, 8))
    session = apply(Plan.preset("lpmm").set("activation", INT4), net)
    optimizer = optim.AdamW(net.parameters())
    net(rows(8 * 64).view(8, 64, 64)).sum().backward()
    optimizer.step()
    summary = session.summary()
    lines = str(summary).splitlines()
    assert len(lines) == 10 and lines == summary.lines()
    assert lines[6] == f"Not stored as requested: {len(session.changes)} rows of session.changes"
    assert [line.partition(": ")[0] for line in lines[7:9]] == [
        f"  3:input -> {INT4} beside the original",
        "  2:in_place -> unmodified",
    ]
    reasons = {(change.given, change.reason) for change in session.changes}
    assert lines[9] == f"  {len(session.changes) - 2} more for {len(reasons) - 2} other reasons"


def test_before_the_first_step_and_without_changes() -> None:
    net = mlp()
    session = apply(Plan(), net)
    assert repr(session) == "Session(Sequential, 0 forward passes)"
    assert session.summary().lines()[-1] == "Everything is stored as requested"
