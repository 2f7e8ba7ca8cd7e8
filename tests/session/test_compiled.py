"""`session.compile()`: gradients, exact masks, names, stored bytes and resumed runs inside the graphs of torch.compile, on the CPU.

Kernels are compiled without vector instructions, which takes half the time; tests/codec/test_graph_codec.py compiles the codec with them.
Tests of what follows from the graphs alone, `in_operations`, run them operation by operation: Inductor takes seconds for each graph.
Random numbers are those of eager mode (`fallback_random`), so that eager mode is the reference of networks with dropout too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from paredown import Plan, Session, apply
from paredown.codec.packed import encode
from paredown.errors import ApplyError
from paredown.formats.format import Format
from tests.programs.compiling import runs_graphs
from tests.session.nets import INT4, INT8, Net, activations, assert_same, gradients, pictures, relative_error, rows, step, weighted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
NEAR = {INT8: 0.03, INT4: 0.3}  # as in test_gradients.py: a few times the relative error of the format, 0.6 % and 10 %
FUSED = 1e-5  # float32 sums in another order


@pytest.fixture(scope="module", autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    limits = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with (
        inductor_config.patch({"cpp.simdlen": 1, "fallback_random": True, "compile_threads": 1}),
        torch._dynamo.config.patch(limits),
    ):
        yield
    run_of.cache_clear()
    run_in_operations.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def in_operations() -> Iterator[None]:
    with runs_graphs():
        yield


class Residual(nn.Module):
    """Convolutions, batch norms, ReLUs and a residual connection, in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm1, self.relu = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv, self.norm2, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 8)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.stem(x)))
        h = self.relu(h + self.norm2(self.conv(h)))
        return self.head(h.mean((2, 3)))


class Block(nn.Module):
    """A transformer block of width 64 with 4 heads, dropout, and a batch norm over the tokens at its end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ln1, self.q, self.k, self.v, self.out = nn.LayerNorm(64), *(nn.Linear(64, 64) for _ in range(4))
        self.ln2, self.up, self.gelu, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (layer(h).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.drop(self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        x = x + self.down(self.gelu(self.up(self.ln2(x))))
        return self.norm(x.flatten(0, 1))


@dataclass
class Run:
    """A compiled step under a plan, and the same step of the unmodified eager model."""

    net: nn.Module
    session: Session
    compiled: Any
    x: Tensor
    plain: list[Tensor]
    found: list[Tensor]
    bytes_before_backward: int


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network and its input."""
    if name == "block":
        return Block(), rows(128 * 64).view(4, 32, 64, 64)[:, :, 0]
    return Residual(), pictures(4, side=16).contiguous(memory_format=torch.channels_last)


def tanh_net() -> Net:
    return Net(lambda net, x: net.b(torch.tanh(net.a(x))))


def autocast(name: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=name.endswith("bf16"))


@lru_cache
def run_of(name: str, format: str) -> Run:
    """One step of a network with all activations in `format`, in kernels of Inductor."""
    return make_run(name, format)


@lru_cache
def run_in_operations(name: str, format: str) -> Run:
    """The same operation by operation; slots and stored bytes follow from the graphs."""
    with runs_graphs():
        return make_run(name, format)


def make_run(name: str, format: str) -> Run:
    net, x = network(name)
    with autocast(name):
        plain = step(copy.deepcopy(net), x)
    session = apply(activations(format), net)
    compiled = session.compile()
    torch.manual_seed(3)
    with autocast(name):
        y = compiled(x)
    stored = session.stored_bytes
    weighted(y).backward()
    assert session.stored_bytes == 0 and y.grad_fn is not None
    return Run(net, session, compiled, x, plain, gradients(net), stored)


RUNS = [("residual", INT8), ("residual bf16", INT4), ("block", INT8), pytest.param("block", INT4, marks=pytest.mark.full)]
ATTENTION = ":scaled_dot_product_attention."


@pytest.mark.parametrize(("name", "format"), RUNS)
def test_gradients_are_near_those_of_the_unmodified_eager_model(name: str, format: str) -> None:
    run = run_of(name, format)
    assert 1e-4 < relative_error(run.found, run.plain) < NEAR[format]


def nbytes(*formats: str, numel: int = 8192) -> int:
    return sum(Format.parse(format).nbytes((numel,)) for format in formats)


def test_stored_bytes_are_those_of_formats_and_masks() -> None:
    """residual: the inputs of two norms and two signs; block: attention, the inputs of two norms and of the GELU, a dropout mask."""
    assert run_of("residual", INT8).bytes_before_backward == 2 * nbytes("uint8/64@bf16+bf16", numel=16384) + 2 * 16384 // 8
    assert run_of("residual bf16", INT4).bytes_before_backward == 2 * nbytes("uint4/64@bf16+bf16", numel=16384) + 2 * 16384 // 8
    attention = nbytes("int8/64@bf16", "int8/64@bf16", "int8/64@bf16", "bf16")
    eight, four = (2 * nbytes(f"uint{b}/64@bf16+bf16") + nbytes(f"int{b}/64@bf16", numel=16384) for b in (8, 4))
    assert run_of("block", INT8).bytes_before_backward == attention + eight + 8192 // 8
    assert run_in_operations("block", INT4).bytes_before_backward == attention + four + 8192 // 8


def test_a_plan_without_activations_changes_no_bit_of_a_compiled_model() -> None:
    """Plain torch.compile and the session partition the same joint graph."""
    net = tanh_net()
    expected = step(torch.compile(net), rows())
    session = apply(Plan.uniform(moment1=INT8), net)
    compiled = session.compile()
    assert_same(step(compiled, rows()), expected)
    y = compiled(rows())
    assert session.stored_bytes == 0 and y.grad_fn is not None


@pytest.mark.parametrize(("format", "make"), [(INT8, run_of), (INT4, run_in_operations)], ids=[INT8, INT4])
def test_slots_have_the_names_and_formats_of_eager_mode(format: str, make: Callable[[str, str], Run]) -> None:
    net, x = network("block")
    eager = apply(activations(format), net)
    step(net, x)
    compiled = make("block", format).session
    names = {name for d in compiled._compiled.decisions.values() for name in d.slot.names}  # type: ignore[union-attr]
    assert names == {*eager._activations.decisions, *eager._activations.not_packed}
    expected, found = ({change.slot: change for change in session.changes} for session in (eager, compiled))
    assert {"ln1:input", "ln2:input", "norm:input", f"{ATTENTION}output"} <= found.keys() == expected.keys()
    assert all(found[slot].given == expected[slot].given and found[slot].reason for slot in found)
    assert "the caller holds it" in found["ln1:input"].reason


def test_attention_whose_logits_grow_is_compiled_again() -> None:
    """The repeated call leaves batch norm's statistics and the random numbers of dropout as one call does."""
    run = run_of("block", INT8)
    with torch.no_grad():
        run.net.get_parameter("q.weight").mul_(30)
    reference = copy.deepcopy(run.net)
    plain, random = step(reference, run.x), torch.get_rng_state()
    found = step(run.compiled, run.x)
    assert torch.equal(torch.get_rng_state(), random)
    assert relative_error(found, plain) < NEAR[INT8]
    torch.testing.assert_close(dict(run.net.named_buffers()), dict(reference.named_buffers()), rtol=FUSED, atol=FUSED)
    reasons = {change.slot: change.reason for change in run.session.changes}
    assert all("logits are up to" in reasons[f"{ATTENTION}{name}"] for name in ("query", "key", "value", "output"))
    assert relative_error(step(run.compiled, run.x), step(reference, run.x)) < NEAR[INT8]
    run_of.cache_clear()  # the networks of other tests have small logits


def test_signs_and_dropout_masks_are_exact() -> None:
    """The gradient of the first bias is a sum over gradients where ReLU and dropout let them through."""
    net, x = Net(lambda net, x: net.more[1](net.b(net.more[0](net.a(x)))), nn.ReLU(), nn.Dropout(0.3)), rows()
    values = torch.relu(net.a(x)).detach()
    flipped = (encode(values, "int2/64@bf16", rounding="nearest_even").decode() > 0) != (values > 0)
    assert flipped.float().mean() > 0.1, "rounding would flip signs"
    plain = step(net, x)
    session = apply(Plan.uniform(activation="int2/64@bf16", rounding="nearest_even"), net)
    found = step(session.compile(), x)
    torch.testing.assert_close(found[:2], plain[:2], rtol=FUSED, atol=FUSED)  # weight and bias of the first layer
    assert relative_error(found[2:3], plain[2:3]) > 0.1, "the second layer's input is rounded"


# --- random bits ------------------------------------------------------------------------------------------------------


def test_random_bits_follow_from_seed_and_calls_and_resume() -> None:
    def started(seed: int) -> tuple[Session, Any]:
        session = apply(activations(INT4, "stochastic"), net := Net(lambda net, x: net.b(net.a(x))), seed=seed)
        nets.append(net)
        return session, session.compile()

    nets: list[nn.Module] = []  # a session does not keep its model alive
    (session, first), (resumed, other) = started(1), started(2)
    one, two = step(first, rows()), step(first, rows())
    state = session.state_dict()
    three = step(first, rows())
    assert state["forwards"] == 2
    for different in (two, three, step(other, rows())):
        assert not torch.equal(different[2], one[2])
    resumed.load_state_dict(state)
    assert_same(step(other, rows()), three)
    resumed.load_state_dict({**state, "forwards": 0})
    assert_same(step(other, rows()), one)
    assert resumed.forwards == 1 and session.forwards == 3
    x = rows()
    x[3, 5] = torch.inf
    assert not step(other, x)[2].isfinite().all(), "for a GradScaler to see it"


# --- what models do ---------------------------------------------------------------------------------------------------


def test_graph_breaks_shapes_and_compiled_layers() -> None:
    """Two graphs, one of which is a layer that the user compiled; a second shape makes their sizes dynamic."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.a(x))
        torch._dynamo.graph_break()
        return net.b(torch.sigmoid(net.more[0](h)))

    net = Net(forward, torch.compile(nn.Linear(64, 64)))
    inputs = rows(), rows(192), rows(256)
    with torch._dynamo.config.patch(disable=True):
        plain = [step(net, x) for x in inputs]
    session = apply(activations(INT8), net)
    compiled = session.compile()
    for x, expected in zip(inputs, plain, strict=True):
        y = compiled(x)
        assert session.stored_bytes > 0
        net.zero_grad()
        weighted(y).backward()
        assert relative_error(gradients(net), expected) < NEAR[INT8]
        assert session.stored_bytes == 0
    assert session.forwards == 6
    session.load_state_dict({**session.state_dict(), "seed": 5})
    with pytest.raises(ApplyError, match=r"seed 5, and a graph of dynamic sizes was compiled with seed 0: load the state before"):
        compiled(rows(320))


@pytest.mark.usefixtures("in_operations")
def test_attention_of_dynamic_sizes_stays_unmodified() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (net.a, net.b))
        return scaled_dot_product_attention(q * 30, k, k)

    net, x = Net(forward), rows().view(4, 32, 64)
    plain = step(net, x)
    session = apply(activations(INT8), net)
    assert relative_error(step(session.compile(dynamic=True), x), plain) < NEAR[INT8]
    reasons = {change.slot: change.reason for change in session.changes}
    assert "dynamic" in reasons[f"{ATTENTION}key"]


def test_views_tied_weights_checkpoints_and_evaluation() -> None:
    """With reduce-overhead, which changes nothing on a CPU."""

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(lambda x: torch.tanh(net.a(x)), x, use_reentrant=False)
        y = net.b(torch.sigmoid(net.b(h)))
        return y.view(-1), y

    net: Any = Net(forward)  # type: ignore[arg-type]
    net.a.weight = net.b.weight
    plain = step(net, rows(), loss=lambda outputs: weighted(outputs[0]))
    session = apply(activations(INT8), net)
    compiled = session.compile(mode="reduce-overhead")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(rows())[1], net.way(net, rows())[1], rtol=FUSED, atol=FUSED)
    assert session.stored_bytes == 0 and session.forwards == 0
    view, _ = compiled(rows())
    assert session.stored_bytes > 0
    net.zero_grad()
    weighted(view).backward()
    assert relative_error(gradients(net), plain) < NEAR[INT8]
    assert session.stored_bytes == 0 and session.forwards == 1


@pytest.mark.usefixtures("in_operations")
def test_a_closed_session() -> None:
    """Its graphs still pack; torch.compile of the model does not, and another session compiles the model for its own plan."""
    net = Net(lambda net, x: net.b(net.a(x)))
    plain = step(net, rows())
    session = apply(activations(INT8), net)
    compiled = session.compile()
    assert relative_error(step(copy.deepcopy(compiled), rows()), plain) < NEAR[INT8], "a copy of a compiled model"
    session.close()
    assert 1e-4 < relative_error(step(compiled, rows()), plain) < NEAR[INT8]
    with pytest.raises(ApplyError, match=r"session is closed.* apply the plan again, then call compile\(\)"):
        session.compile()
    unmodified = torch.compile(net)
    assert relative_error(step(unmodified, rows()), plain) < FUSED
    other = apply(activations(INT4), net).compile()
    assert NEAR[INT8] < relative_error(step(other, rows()), plain) < NEAR[INT4]


@pytest.mark.usefixtures("in_operations")
def test_modules_with_packed_weights_are_listed() -> None:
    net = tanh_net()
    session = apply(Plan.uniform(activation=INT8, weight=INT8), net)
    with session.unpacked():
        plain = step(copy.deepcopy(net), rows())
    assert relative_error(step(session.compile(), rows()), plain) < NEAR[INT8]
    assert any(change.slot.startswith("weight=") and change.given == "unmodified" for change in session.changes)


def test_refusals() -> None:
    net = tanh_net()
    session = apply(activations(INT8), net)
    with pytest.raises(ApplyError, match=r"graphs of Inductor, and backend='aot_eager' was requested: leave backend out"):
        session.compile(backend="aot_eager")


class SelfAttention(nn.Module):
    """One tensor is query, key and value; dropout follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(x.shape[0], -1, 4, 16).transpose(1, 2)
        y = scaled_dot_product_attention(h, h, h).transpose(1, 2).reshape(x.shape)
        return self.last(torch.relu(y))


@pytest.mark.usefixtures("in_operations")
def test_one_tensor_that_is_query_key_and_value() -> None:
    torch.manual_seed(0)
    net, x = SelfAttention(), torch.randn(8, 32, 64)
    plain = step(net, x)
    session = apply(activations(INT8), net)
    assert relative_error(step(session.compile(), x), plain) < NEAR[INT8]
    session.close()


def test_masks_with_two_dynamic_sizes_are_saved() -> None:
    """Their sizes do not follow from those of bits: they are saved as booleans."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64))
    with apply(activations(INT8), net) as session:
        compiled = session.compile(dynamic=True)
        for num_rows, num_cols in ((4, 33), (7, 21)):
            compiled(torch.randn(num_rows, num_cols, 64)).sum().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


class Classifier(nn.Module):
    """A convolution, a ReLU, a pool and a linear layer, whose loss is the cross entropy of 64 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.pool, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Linear(8 * 8 * 8, 64)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.pool(torch.relu(self.conv(x))).flatten(1))
        return nn.functional.cross_entropy(4 * scores, torch.arange(len(x)) % 64)


def test_signs_indices_and_log_probabilities_are_exact_where_the_input_of_a_layer_is_packed() -> None:
    """Forward is exact, so each gradient that follows from these alone is that of the unmodified model: all but the last weight's."""
    x = pictures(128, side=16)
    net, plain = Classifier(), Classifier()
    session = apply(activations(INT4), net)
    session.compile()(x).backward()
    plain(x).backward()
    errors = {
        name: relative_error([p.grad], [q.grad]) for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True)
    }
    assert errors.pop("head.weight") > 0.01, "nothing is packed: the test is empty"
    assert max(errors.values()) < FUSED, errors
    session.close()


@pytest.mark.usefixtures("in_operations")
def test_the_memory_budget_of_torch_composes() -> None:
    """With `activation_memory_budget` the partitioner recomputes more, and what it still saves is packed."""
    x = rows(512)
    plain = step(copy.deepcopy(net := tanh_chain()), x)
    stored: list[int] = []
    for budget in (1.0, 0.6):
        torch._dynamo.reset()
        with (
            torch._functorch.config.patch(activation_memory_budget=budget),
            apply(activations(INT8), copied := copy.deepcopy(net)) as session,
        ):
            y = session.compile()(x)
            stored.append(session.stored_bytes)
            weighted(y).backward()
            assert relative_error(gradients(copied), plain) < NEAR[INT8]
    assert 0 < stored[1] < stored[0], stored


def tanh_chain() -> nn.Module:
    """Six linear layers with tanh between them."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
