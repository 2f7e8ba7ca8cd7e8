"""`verify` passes on ordinary networks, fails on planted defects and names their slots, and restores the model."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import paredown as pare
from paredown.autograd.graph import IS_WEIGHT
from paredown.check.verify import OUTSIDE
from paredown.errors import ApplyError, VerificationError
from paredown.plan import storage
from paredown.session.eager.activations import Activations
from paredown.session.eager.stored_tensors import StoredMask, StoredValues
from paredown.session.weights.saved_weights import DeferredWeight
from tests.predict.steps import step_of
from tests.session.nets import INT4, INT8, ROWS, WIDTH, Net, activations, pictures, rows

Answers = tuple[Tensor, Tensor]


def answers(num: int, classes: int = 10) -> Tensor:
    return torch.randint(classes, (num,), generator=torch.Generator().manual_seed(2))


def perceptron() -> tuple[nn.Module, Answers]:
    """Four slots of 8192 values or more, each of a size of its own, with dropout."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 96), nn.Dropout(0.2), nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), (rows(), answers(ROWS))


def convolutions() -> tuple[nn.Module, Answers]:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 10)), (pictures(8), answers(8))


def transformer() -> tuple[nn.Module, Answers]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * 32, 10)), (
        rows(8 * 32, 32).view(8, 32, 32),
        answers(8),
    )


NETWORKS = {"perceptron": perceptron, "convolutions": convolutions, "transformer": transformer}
EVERYTHING = pare.Plan.preset("lpmm").set("activation", INT8)


# --- what passes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("plan", [activations(INT8), activations(INT4), EVERYTHING], ids=["int8", "int4", "lpmm"])
def test_ordinary_networks_pass(name: str, plan: pare.Plan) -> None:
    model, batch = NETWORKS[name]()
    found = pare.verify(model, batch, plan, loss=cross_entropy)
    assert found.ok and not found.at_fault and not found.notes, found
    assert [row.name for row in found.rows] == [name for name, _ in model.named_parameters()]
    assert all(row.exact_error == 0 for row in found.rows), "bit for bit"
    assert 0 < max(row.error for row in found.rows) <= found.tolerance, "something was quantized"


def test_errors_are_those_of_a_session() -> None:
    """Against gradients of a copy under `apply`, from the definition of the relative error."""
    model, (x, y) = perceptron()
    model.eval()
    found = pare.verify(model, (x, y), activations(INT8), loss=cross_entropy)
    plain, packed = copy.deepcopy(model), copy.deepcopy(model)
    cross_entropy(plain(x), y).backward()
    with pare.apply(activations(INT8), packed):
        cross_entropy(packed(x), y).backward()
    errors = {row.name: row.error for row in found.rows}
    pairs = zip(plain.named_parameters(), packed.parameters(), strict=True)
    own = {
        name: float((a.grad - b.grad).norm() / a.grad.norm()) for (name, a), b in pairs if a.grad is not None and b.grad is not None
    }
    for name in ("0.weight", "2.weight", "4.weight"):  # a weight has a larger gradient than the bias beside it, or its own
        assert 0 < errors[name] <= own[name] * (1 + 1e-4)
    assert max(errors.values()) > 0.3 * max(own.values())


def test_parameters_whose_gradient_is_rounding_alone_are_not_off() -> None:
    """A batch norm subtracts the bias of the convolution before it: its gradient is 0 but for rounding."""
    model, batch = convolutions()
    found = {row.name: row for row in pare.verify(model, batch, activations(INT8), loss=cross_entropy).rows}
    assert found["4.bias"].verdict == "ok"


def test_an_autocast_context_and_the_keyword_are_the_same() -> None:
    model, batch = perceptron()
    by_keyword = pare.verify(model, batch, activations(INT8), loss=cross_entropy, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        by_context = pare.verify(model, batch, activations(INT8), loss=cross_entropy)
    assert by_keyword.ok and by_keyword == by_context
    assert by_keyword != pare.verify(model, batch, activations(INT8), loss=cross_entropy)


def test_a_mapping_without_a_loss_reads_the_output() -> None:
    class Named(Net):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": cross_entropy(self.b(torch.tanh(self.a(x))), labels)}

    batch = {"x": rows(), "labels": answers(ROWS)}
    assert pare.verify(Named(lambda net, x: x), batch, activations(INT8)).ok


def test_an_open_session_is_verified_under_its_plan() -> None:
    model, (x, y) = perceptron()
    with pare.apply(EVERYTHING, model, seed=5) as session:
        loss = cross_entropy(model(x), y)
        state, changes = session.state_dict(), session.changes
        found = pare.verify(model, (x, y), loss=cross_entropy)
        assert found.ok and any(row.error > 0 for row in found.rows)
        assert session.state_dict() == state and session.changes == changes
        assert not pare.verify(model, (x, y), loss=cross_entropy, tolerance=1e-4).ok  # with a search for slots
        assert session.state_dict() == state and session.changes == changes
        loss.backward()
        assert pare.verify(model, (x, y), EVERYTHING, loss=cross_entropy) == found
        with pytest.raises(ApplyError, match="leave the plan out to verify that one, or call its close"):
            pare.verify(model, (x, y), activations(INT4), loss=cross_entropy)


def test_recomputed_modules_are_part_of_it() -> None:
    model, batch = convolutions()
    found = pare.verify(model, batch, activations(INT8).recomputing("1", "5"), loss=cross_entropy)
    assert found.ok and all(row.exact_error == 0 for row in found.rows)


def test_frozen_and_unused_parameters_have_no_row() -> None:
    model = Net(lambda net, x: net.a(x).tanh().tanh(), nn.Linear(4, 4))
    model.a.bias.requires_grad_(False)
    found = pare.verify(model, (rows(), rows(seed=2)), activations(INT8), loss=mse_loss)
    assert found.ok and [row.name for row in found.rows] == ["a.weight"]


def test_sparse_gradients_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64, sparse=True), nn.Tanh(), nn.Linear(64, 64))
    found = pare.verify(model, (torch.arange(128) % 50, rows(seed=2)), activations(INT8), loss=mse_loss)
    assert found.ok and 0 < found.rows[0].error < 0.02 and found.rows[0].name == "0.weight"


class Restless(Net):
    """A model with a random number generator of its own, whose state `verify` does not restore."""

    def __init__(self, size: float) -> None:
        super().__init__(lambda net, x: net.b(net.a(x).tanh() * (1 + size * net.next())))
        self.generator = torch.Generator().manual_seed(0)

    def next(self) -> float:
        return float(torch.rand(1, generator=self.generator))


def test_a_model_that_differs_from_itself_is_compared_with_that_distance() -> None:
    found = pare.verify(Restless(1e-4), (rows(), rows(seed=2)), activations(INT8), loss=mse_loss)
    assert found.ok and 0 < found.exact_tolerance < 0.01
    assert any(row.exact_error > 0 for row in found.rows)
    assert "the unmodified model differs from itself by" in found.reason
    assert "same bits" not in repr(found).splitlines()[-1]


# --- what fails -------------------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, numel: int, change: Callable[[Tensor], Tensor]) -> None:
    """Tensors of `numel` values are decoded wrongly."""
    decode = StoredValues._unpacked

    def unpacked(self: StoredValues) -> Tensor:
        return change(decode(self)) if self.numel == numel else decode(self)

    monkeypatch.setattr(StoredValues, "_unpacked", unpacked)


@pytest.mark.parametrize("change", [torch.zeros_like, lambda x: x + 1e-6 * x.abs().max()], ids=["zeros", "a millionth"])
@pytest.mark.parametrize(("numel", "slot"), [(ROWS * 96, "4:input"), (ROWS * 128, "6:input")])
def test_a_slot_that_comes_back_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, numel: int, slot: str, change: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 96), nn.Identity(), nn.Linear(96, 128), nn.Identity(), nn.Linear(128, 10)]
    model, batch = nn.Sequential(*layers), (rows(), answers(ROWS))
    assert pare.verify(model, batch, activations(INT8), loss=cross_entropy).ok
    spoil(monkeypatch, numel, change)
    found = pare.verify(model, batch, activations(INT8), loss=cross_entropy)
    assert not found.ok
    assert [(fault.slot, fault.format, fault.under) for fault in found.at_fault] == [(slot, INT8, "exact plan")]
    assert found.at_fault[0].error == found.at_fault[0].alone > 0
    wrong = [row.name for row in found.rows if row.verdict == "off under the exact plan"]
    assert wrong == [f"{slot[0]}.weight"], "a linear layer's input reaches nothing but its own weight"
    with pytest.raises(VerificationError, match=rf"(?s)plan\.set\(slot, None\).*{slot} .*{INT8}"):
        found.check()


def test_masks_of_two_views_that_are_taken_for_one_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two multipliers in one storage, with different values beside 0: the planted defect gives the value of the first to both."""
    first: dict[int, StoredMask] = {}
    make, begin = StoredMask.__init__, Activations.begin

    def made(self: StoredMask, piece: Any, *rest: Any, **named: Any) -> None:
        make(self, piece, *rest, **named)
        self.inside = first.setdefault(piece.storage._cdata, self).inside

    def begun(self: Activations, **options: Any) -> None:
        first.clear()
        begin(self, **options)

    def forward(net: Any, x: Tensor) -> Tensor:
        h, w = net.a(x), torch.stack([(x > 0).float(), 2 * (x > 0.5).float()])
        return net.b(h.sin() * w[0] + h.cos() * w[1])

    monkeypatch.setattr(StoredMask, "__init__", made)
    monkeypatch.setattr(Activations, "begin", begun)
    for plan in (activations("fp32"), activations(INT8)):
        found = pare.verify(Net(forward), (rows(), rows(seed=2)), plan, loss=mse_loss)
        assert {row.name for row in found.rows if row.verdict == "off under the exact plan"} == {"a.weight", "a.bias"}
        assert {(fault.slot, fault.under) for fault in found.at_fault} == {
            (":mul.other", "exact plan"),
            (":mul#2.other", "exact plan"),
        }
        assert all(fault.error > 0.1 and fault.alone == 0 for fault in found.at_fault)
        assert found.notes == ("2 slots are off together, and no fewer of them: :mul.other, :mul#2.other",)


def test_a_format_that_does_not_suit_its_slot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A symmetric format before a norm whose input has a mean of a hundred standard deviations, which sessions replace: the exact plan
    is right."""
    monkeypatch.setattr(storage, "resolves_differences", lambda format: True)
    model = Net(lambda net, x: net.b(net.more[0](0.01 * net.a(x) + 1)), nn.LayerNorm(WIDTH))
    batch = rows(), rows(seed=2)
    found = pare.verify(model, batch, activations(INT8), loss=mse_loss)
    assert [(fault.slot, fault.under) for fault in found.at_fault] == [("more.0:input", "plan")]
    assert {row.verdict for row in found.rows} == {"ok", "off"} and all(row.exact_error == 0 for row in found.rows)
    repaired = activations(INT8).set("more.0:input", None)
    assert pare.verify(model, batch, repaired, loss=mse_loss).ok


def test_a_tolerance_replaces_the_one_of_the_formats() -> None:
    model, batch = perceptron()
    found = pare.verify(model, batch, activations(INT8), loss=cross_entropy, tolerance=1e-5)
    assert not found.ok and found.tolerance == 1e-5 and found.reason == "tolerance=1e-05 was given"
    assert len(found.at_fault) >= 1 and {fault.under for fault in found.at_fault} == {"plan"}
    loose = pare.verify(model, batch, activations(INT8), loss=cross_entropy, tolerance=10)
    assert loose.ok


def test_a_packed_weight_that_comes_back_wrong_is_said_to_be_outside_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Net(lambda net, x: net.b(net.a(x).tanh())), (rows(), rows(seed=2))
    plan = pare.Plan.uniform(weight="int8/64@e8m0", activation=INT8)
    assert pare.verify(model, batch, plan, loss=mse_loss).ok
    decode = DeferredWeight.tensor

    def wrong(self: DeferredWeight) -> Tensor:
        return 1.5 * decode(self)

    setattr(wrong, IS_WEIGHT, True)
    monkeypatch.setattr(DeferredWeight, "tensor", wrong)
    found = pare.verify(model, batch, plan, loss=mse_loss)
    assert [(fault.slot, fault.under) for fault in found.at_fault] == [(OUTSIDE, under) for under in ("exact plan", "plan")]
    assert {row.verdict for row in found.rows if row.name.startswith("a.")} == {"off under the exact plan"}


# --- what is left as it was -------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> list[Any]:
    """Every hook of every module, in order, and the flags that torch keeps beside them."""
    names = [name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))]
    assert len(names) > 8
    return [list(vars(module)[name].items()) for module in model.modules() for name in names]


@pytest.mark.parametrize("plan", [activations(INT8), EVERYTHING.recomputing("1"), activations(INT4)], ids=["int8", "lpmm", "off"])
def test_nothing_is_changed(plan: pare.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = convolutions()
    model.append(nn.Dropout(0.5))
    model[7].eval()
    model[0].register_forward_hook(lambda module, args, output: None)
    cross_entropy(model(x), y).backward()
    pending = cross_entropy(model(x), y)  # a graph whose backward has not run yet
    state, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    gradients, copies = [p.grad for p in parameters], [copy.deepcopy(p.grad) for p in parameters]
    there, modes = hooks(model), [module.training for module in model.modules()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    if plan == activations(INT4):
        monkeypatch.setattr(StoredValues, "_unpacked", lambda self: torch.zeros(self.numel))
    assert pare.verify(model, (x, y), plan, loss=cross_entropy).ok == (plan != activations(INT4))
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert hooks(model) == there and [module.training for module in model.modules()] == modes
    assert all(p is q and type(p) is nn.Parameter for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is g and torch.equal(g, c) for p, g, c in zip(parameters, gradients, copies, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled() and torch.get_autocast_dtype("cpu") is torch.bfloat16
    pending.backward()
    pare.apply(plan, model).close()  # no session is left behind


def test_what_the_step_raises_is_raised_and_nothing_is_left() -> None:
    model = Net(lambda net, x: net.b(net.a(x).tanh()))
    before = copy.deepcopy(model.state_dict())
    there, calls = hooks(model), [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyError("third")
        return mse_loss(output, target)

    with pytest.raises(KeyError, match="third"):
        pare.verify(model, (rows(), rows(seed=2)), EVERYTHING, loss=loss)
    assert hooks(model) == there
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    pare.apply(EVERYTHING, model).close()


def test_less_memory_means_fewer_examples() -> None:
    model, sizes = Net(lambda net, x: net.b(net.a(x).tanh())), list[int]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(output))
        if len(output) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mse_loss(output, target)

    found = pare.verify(model, (rows(256), rows(256, seed=2)), activations(INT8), loss=loss)
    assert found.ok and sizes[:3] == [256, 128, 64] and set(sizes[2:]) == {64}
    assert found.notes == ("the unmodified step runs out of memory with 256 examples: 64 were compared",)

    def never(output: Tensor, target: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ApplyError, match="runs out of memory with one of 128 examples"):
        pare.verify(model, (rows(), rows(seed=2)), activations(INT8), loss=never)


@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_reference_networks_pass(name: str) -> None:
    model, batch, loss = step_of(name, 4)
    found = pare.verify(model, batch, activations(INT8), loss=loss)
    assert found.ok and all(row.exact_error == 0 for row in found.rows), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_same_on_a_gpu(autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = convolutions()
    model, batch = model.cuda(), (x.cuda(), y.cuda())
    state = torch.cuda.get_rng_state()
    for plan in (activations(INT8), EVERYTHING):
        found = pare.verify(model, batch, plan, loss=cross_entropy, autocast=autocast)
        assert found.ok and not found.at_fault, found
    assert torch.equal(torch.cuda.get_rng_state(), state)
    spoil(monkeypatch, 8 * 16 * 16 * 16, torch.zeros_like)
    found = pare.verify(model, batch, activations(INT8), loss=cross_entropy, autocast=autocast)
    assert not found.ok and {fault.slot for fault in found.at_fault} <= {"4:input", "5:input"}
