"""The loss in chunks in compiled sessions: values and gradients, what the graphs hold, what they save, and their traces."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import paredown
from paredown import Plan, Role, Trace, footprint, trace_step
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES, KERNEL_DEVICES
from paredown.loss.loss_operator import OperatorSettings, chunked_gradients, chunked_loss
from paredown.loss.output_head import COMPILED, NOT_IN_GRAPHS
from paredown.predict.graph_memory import scratch_bytes
from paredown.session.compiled import graph_packing
from tests.loss.test_chunked_sessions import Layers, head_rows, hugging_face
from tests.loss.test_deferred_logits import (
    NUM_CLASSES,
    SIZE,
    Loss,
    Model,
    by_module,
    by_row,
    classes_first,
    classes_first_by_row,
    flat,
    log_probabilities,
    shifted,
    soft_capped,
    soft_capped_functions,
    step,
    tokens,
)
from tests.programs.compiling import compiles_quickly, run_graph

apply = partial(paredown.apply, chunked_loss=True)
INT8 = Plan.uniform(activation="int8/64@bf16")


class WithLoss(nn.Module):
    """A model and its loss, returned with the logits as Hugging Face models do, or alone."""

    def __init__(self, model: nn.Module, loss: Loss, *, returns_logits: bool = False) -> None:
        super().__init__()
        self.model, self.loss, self.returns_logits = model, loss, returns_logits

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.model(ids)
        loss = self.loss(logits, labels)
        return (loss, logits) if self.returns_logits else loss


@contextmanager
def compiled_graphs() -> Generator[list[fx.GraphModule]]:
    """The graphs of forward and backward that sessions compile inside the context; they run operation by operation."""
    found: list[fx.GraphModule] = []

    def record(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        found.append(gm)
        return run_graph(gm, inputs)

    with compiles_quickly(), patch.object(graph_packing, "compile_fx_inner", record):
        yield found


def most_rows(graphs: list[fx.GraphModule]) -> int:
    """The elements of the largest tensor in graphs, in rows of NUM_CLASSES."""
    values = [leaf for gm in graphs for node in gm.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    return max(value.numel() // NUM_CLASSES for value in values if isinstance(value, Tensor))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


LOSSES = [
    shifted,
    soft_capped,
    by_module,
    classes_first_by_row,
    *(pytest.param(loss, marks=pytest.mark.full) for loss in (flat, soft_capped_functions, by_row, classes_first)),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_inside_of_graphs(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * NUM_CLASSES * 4)
    model = Model(tied=loss is shifted)
    expected = step(model, loss)
    model.zero_grad()
    with compiled_graphs() as graphs, apply(Plan.uniform(), (whole := WithLoss(model, loss))) as session:
        value = session.compile(fullgraph=True)(tokens(), tokens())
        value.backward()
        assert not session.changes and session._head.use.num_losses == (2 if loss is classes_first else 1)
    torch.testing.assert_close([value.detach(), *gradients(whole)], expected)
    assert len(graphs) == 2 and most_rows(graphs) == SIZE, "the weight; all logits are 15 rows"


@pytest.mark.parametrize("loss", [shifted, pytest.param(soft_capped, marks=pytest.mark.full)], ids=lambda loss: loss.__name__)
def test_losses_outside_of_graphs(loss: Loss) -> None:
    expected = step(model := Model(tied=True), loss)
    model.zero_grad()
    with compiled_graphs() as graphs, apply(INT8, model) as session:
        compiled = session.compile(fullgraph=True)
        value = loss(compiled(tokens()), tokens())
        value.backward()
        assert not head_rows(session) and session._head.use.num_losses == 1
        assert type(compiled.eval()(tokens())) is Tensor and not head_rows(session)
    torch.testing.assert_close([value.detach(), *gradients(model)], expected)
    assert most_rows(graphs) == SIZE


@pytest.mark.parametrize("frozen", ["head", "embedding"])
def test_frozen_parts(frozen: str) -> None:
    def by_keywords(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(torch.flatten(logits, start_dim=0, end_dim=-2), labels.flatten())

    model = Model()
    model.get_submodule(frozen).requires_grad_(False)
    expected = step(model, by_keywords)
    model.zero_grad()
    with compiled_graphs() as graphs, apply(Plan.uniform(), WithLoss(model, by_keywords)) as session:
        value = session.compile()(tokens(), tokens())
        value.backward()
        assert not session.changes
    torch.testing.assert_close([value.detach(), *gradients(model)], expected)
    assert most_rows(graphs) == SIZE


def test_logits_beside_a_loss() -> None:
    """As Hugging Face models return them: they are deferred, and have their values and gradients if something reads them."""
    model = Model()
    logits = model(tokens())
    (flat(logits, tokens()) + logits.square().mean()).backward()
    expected = gradients(model)
    model.zero_grad()
    with compiled_graphs() as graphs, apply(Plan.uniform(), WithLoss(model, flat, returns_logits=True)) as session:
        with torch.autocast("cpu", torch.bfloat16):
            loss, deferred = session.compile()(tokens(), tokens())
        assert deferred.dtype is torch.bfloat16 and deferred.shape == logits.shape and not session.changes
        loss, deferred = session.compile()(tokens(), tokens())
        assert most_rows(graphs) == SIZE
        (loss + deferred.square().mean()).backward()
        torch.testing.assert_close(deferred.detach() + 0, logits.detach())
        assert "square" in head_rows(session)[0].reason
    torch.testing.assert_close(gradients(model), expected)


def test_graphs_that_read_logits_are_left_unmodified() -> None:
    def loss_and_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return flat(logits, labels) + log_probabilities(logits, labels)

    expected = step(model := Model(), loss_and_entropy)
    model.zero_grad()
    with compiled_graphs() as graphs, apply(Plan.uniform(), WithLoss(model, loss_and_entropy)) as session:
        value = session.compile()(tokens(), tokens())
        value.backward()
        (change,) = head_rows(session)
    assert (change.slot, change.given) == ("model.head", "all logits") and "log_softmax" in change.reason
    torch.testing.assert_close([value.detach(), *gradients(model)], expected)
    assert most_rows(graphs) == tokens().numel()


def test_evaluation_and_plain_torch_compile() -> None:
    model = Model()
    with compiles_quickly(), apply(Plan.uniform(), model) as session:
        compiled = session.compile()
        with torch.no_grad():
            assert type(compiled(tokens())) is Tensor
        assert [row.reason for row in head_rows(session)] == [NOT_IN_GRAPHS]
    with compiles_quickly(), apply(Plan.uniform(), model) as session:
        assert type(torch.compile(model, backend="eager")(tokens())) is Tensor
        assert [(row.given, row.reason) for row in head_rows(session)] == [("unmodified", COMPILED)]


def test_gradients_computed_in_forward_are_not_packed() -> None:
    """The weight's gradient is computed in forward, from hidden states that nothing has packed."""
    model = Layers()
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    flat(model(tokens()), tokens()).backward()
    expected = model.head.weight.grad
    assert expected is not None
    model.zero_grad()
    with compiled_graphs(), apply(Plan.uniform(activation="int4/64@bf16"), WithLoss(model, flat)) as session:
        session.compile()(tokens(), tokens()).backward()
        assert not session.changes
    torch.testing.assert_close(model.head.weight.grad, expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_with_labels(kind: str, autocast: bool) -> None:
    ids = torch.randint(NUM_CLASSES, (2, 32), generator=torch.Generator().manual_seed(1))

    def run(model: Any, called: Any) -> list[Tensor]:
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = called(input_ids=ids, labels=torch.where(ids < 1000, -100, ids)).loss
        loss.backward()
        return [loss.detach(), *gradients(model)]

    with compiles_quickly(), apply(Plan.uniform(), (model := hugging_face(kind)), chunked_loss=False) as session:
        expected = run(model, session.compile())
    with compiled_graphs() as graphs, apply(Plan.uniform(), (model := hugging_face(kind))) as session:
        found = run(model, session.compile())
        assert not session.changes and session._head.use.num_losses == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype and (mine - theirs).norm() <= (0.02 if autocast else 1e-5) * theirs.norm()
    assert most_rows(graphs) == 16


# --- the operator ---------------------------------------------------------------------------------------------------------------------

CALLS = (("to", "float64"), ("div", 3.0), ("tanh", None), ("mul", 3.0))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operator(reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((5, 3), (7, 3), (7,)))
    target, class_weights = torch.tensor([0, 6, -100, 3, 3]), torch.linspace(0.5, 2, 7)
    settings = OperatorSettings("float32", "cpu", (True, True, True), CALLS, reduction=reduction, label_smoothing=0.1)
    arguments: Any = (hidden, weight, bias, target, class_weights, settings.text)
    torch.library.opcheck(chunked_loss, arguments)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    logits = 3 * torch.tanh(functional.linear(*exact) / 3)
    options: Any = {"weight": class_weights.double(), "reduction": reduction, "label_smoothing": 0.1}
    expected = functional.cross_entropy(logits, target, **options)
    expected.square().sum().backward()
    loss = chunked_loss(*arguments)[0]
    loss.square().sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for mine, other in zip((hidden, weight, bias), exact, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, check_dtype=False)
    if reduction == "none":
        inputs: Any = (*(t.detach() for t in (hidden, weight, bias)), target, class_weights, torch.ones(5, dtype=torch.float64))
        torch.library.opcheck(chunked_gradients, (*inputs, settings.text))


@pytest.mark.parametrize("has_kernel", [False, True])
def test_memory_of_the_operator(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", has_kernel)
    monkeypatch.setitem(CHUNK_BYTES, "cuda", chunk := 128 * NUM_CLASSES * 4)
    tensors = (((512, SIZE), torch.float32), ((NUM_CLASSES, SIZE), torch.float32), None, ((512,), torch.int64), None)
    found = scratch_bytes("chunked_loss", tensors, OperatorSettings("float32", "cuda", (True, True, False)).text)
    num_chunks = 1 if has_kernel else 2  # logits, and their log probabilities in torch's operations
    assert num_chunks * chunk <= found <= num_chunks * chunk + 50 * 512 * 8  # and some numbers for each row


def test_the_kernel_stores_one_number_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", True)
    monkeypatch.setitem(CHUNK_BYTES, "cuda", chunk := 512 * NUM_CLASSES * 4)
    num_rows = 512 * 64
    tensors = (((num_rows, SIZE), torch.float32), ((NUM_CLASSES, SIZE), torch.float32), None, ((num_rows,), torch.int64), None)
    found = scratch_bytes("chunked_loss", tensors, OperatorSettings("float32", "cuda", (True, True, False)).text)
    assert chunk < found <= chunk + 4 * num_rows + 2**14  # its loss


# --- traces ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_traces_of_compiled_steps(is_inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_DEVICES, "cuda", True)
    with torch.device("meta"):
        model, ids = Layers(), torch.empty(16, 2048, dtype=torch.int64)
    traced: nn.Module = WithLoss(model, flat) if is_inside else model
    trace = trace_step(traced, (ids, ids), loss=None if is_inside else flat, device="cuda", compiled=True, chunked_loss=True)
    all_logits = ids.numel() * NUM_CLASSES * 4
    assert max(output.nbytes for output in trace.outputs) <= 1.02 * CHUNK_BYTES["cuda"] < all_logits / 3
    assert max(slot.nbytes for slot in trace.slots) < all_logits
    weight, hidden = model.head.weight.numel() * 4, ids.numel() * model.head.in_features * 4
    for plan in (INT8, Plan().set("activation", None), Plan().set("weight", "int8/64@bf16")):
        peak = footprint(trace, plan).peak_bytes
        assert CHUNK_BYTES["cuda"] + 2 * weight <= peak <= CHUNK_BYTES["cuda"] + 8 * (weight + hidden) + 64 * 2**20
    assert footprint(trace).peak_bytes >= all_logits, "a plan without rules is the baseline"
    assert Trace.from_json(trace.to_json()) == trace
    names = [slot.name for slot in trace.slots if slot.role is Role.ACTIVATION and slot.stays]
    assert not [name for name in names if "softmax" in name or "nll" in name]


# --- functions that a graph of Dynamo may have besides ------------------------------------------------------------------------------


class Written(nn.Module):
    """Tokens to hidden states to a loss by `function(model, hidden, labels)`; counts its calls in a buffer, in place."""

    def __init__(self, function: Any, *, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(64, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, NUM_CLASSES, bias=False).requires_grad_(not is_frozen)
        self.count = nn.Buffer(torch.zeros(()))
        self.function = function

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.count.add_(1.0)
        return self.function(self, self.layer(self.embedding(ids)), labels)


def written_before(model: Written, hidden: Tensor, labels: Tensor) -> Tensor:
    hidden = hidden * 1.0
    hidden.add_(3.0 * torch.arange(SIZE).remainder(2))
    return flat(model.head(hidden), labels)


def relu_before(model: Written, hidden: Tensor, labels: Tensor) -> Tensor:
    hidden = hidden * 1.0
    functional.relu(hidden, inplace=True)
    return flat(model.head(hidden), labels)


def written_after(model: Written, hidden: Tensor, labels: Tensor) -> Tensor:
    hidden = hidden * 1.0
    logits = model.head(hidden)
    hidden.add_(3.0 * torch.arange(SIZE).remainder(2))
    return flat(logits, labels) + 0.0 * hidden.sum()


def by_keyword(model: Written, hidden: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(torch.flatten(input=model.head(hidden), start_dim=0, end_dim=1), labels.flatten())


def unflattened(model: Written, hidden: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model.head(hidden).unflatten(-1, (1, NUM_CLASSES)).view(-1, NUM_CLASSES), labels.flatten())


def backward(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("function", "is_frozen", "reader"),
    [
        (written_before, False, ""),
        (relu_before, False, ""),
        (written_after, True, "add_ in place"),
        (by_keyword, False, "flatten"),
        (unflattened, False, "unflatten"),
    ],
)
def test_functions_in_place_and_by_keyword(function: Any, is_frozen: bool, reader: str) -> None:
    ids, labels = torch.arange(16).view(2, 8), torch.arange(16, 32).view(2, 8)
    model, plain = (Written(function, is_frozen=is_frozen) for _ in range(2))
    expected = backward(plain, plain(ids, labels))
    with compiles_quickly(), apply(Plan.uniform(activation="fp32"), model) as session:
        found = backward(model, session.compile()(ids, labels))
        rows = " ".join(str(row) for row in head_rows(session))
    torch.testing.assert_close(found, expected)
    assert model.count == plain.count == 1
    assert reader in rows and bool(reader) == bool(rows)


def test_logits_of_mixed_dtypes_outside_of_the_graph() -> None:
    """Hidden states have the dtype of autocast already, and the weight has not."""
    ids = torch.arange(16).view(2, 8)
    model, plain = (Written(lambda model, hidden, labels: model.head(hidden), is_frozen=False) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(ids, ids).argmax(-1)
        with compiles_quickly(), apply(Plan.uniform(activation="fp32"), model) as session:
            assert torch.equal(session.compile()(ids, ids).argmax(-1), expected)
