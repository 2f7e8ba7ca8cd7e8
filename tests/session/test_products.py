"""Sessions whose linear layers multiply 8-bit codes, on the CPU: which layers do, what is saved, and that nothing about it is silent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from paredown import Plan, Session, apply, footprint, optim, trace_step, verify
from paredown.codec import products as codes
from paredown.errors import ApplyError, PlanError
from paredown.session.compiled import graph_packing, graph_products
from paredown.session.eager import product_layers
from paredown.session.eager.product_layers import FEW_ROWS, HEAD, MULTIPLIED, NARROW
from tests.programs.compiling import compiles_quickly
from tests.session.nets import INT8, assert_same, gradients, relative_error, step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
FP8, ONLY = Plan.preset("fp8"), Plan.uniform(product="e4m3fn")
NEAR = 0.15  # of all gradients: five products in a row, each with operands that are off by 3.6 %; 0.02 to 0.08 measured
SIZE, LENGTH, WORDS = 64, 32, 128


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_layers, "MIN_WIDTH", 16)
    monkeypatch.setattr(product_layers, "MIN_ROWS", 1)


@pytest.fixture
def quick() -> Iterator[None]:
    with compiles_quickly():
        yield


class Layer(nn.Module):
    """A decoder layer: q, k and v read one tensor, and so do gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.q, self.k, self.v, self.out = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(SIZE, 128), nn.Linear(SIZE, 128), nn.Linear(128, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Words(nn.Module):
    """A small language model; `around`: how its layers are called."""

    def __init__(self, around: Any = lambda layer, x: layer(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.around = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, WORDS, bias=False), around
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.around(layer, x)
        return self.head(x)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss(logits: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens().flatten())


def words_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def words_step(model: Any, net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    loss(model(tokens())).backward()
    return gradients(net)


def reasons(session: Session) -> dict[str, str]:
    return {row.slot: row.reason for row in session.changes if row.slot.startswith("product=")}


# --- which layers --------------------------------------------------------------------------------------------------------------------


def test_layers_that_would_not_gain_are_left_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_layers, "MIN_WIDTH", 64)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 100), nn.Linear(100, 64))
    net.append(nn.MultiheadAttention(64, 4)).append(nn.Linear(64, 64, dtype=torch.float64)).append(nn.Linear(64, 64))
    net[6].forward = net[6].forward  # someone replaced it
    with apply(ONLY, net) as session:
        found = reasons(session)
        assert session.explain().of("product=0").why == MULTIPLIED
    assert found["product=1"] == NARROW and "100 x 32" in found["product=2"] and "no multiples of 16" in found["product=3"]
    assert "nn.MultiheadAttention" in found["product=4"] and "NonDynamicallyQuantizableLinear" in found["product=4.out_proj"]
    assert "float64" in found["product=5"] and "forward was replaced" in found["product=6"] and len(found) == 7


def test_heads_are_left_unless_a_rule_names_them() -> None:
    tied = Words()
    tied.head.weight = tied.embedding.weight
    large = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8192))
    for net, path in ((tied, "head"), (large, "1")):
        with apply(ONLY, net) as session:
            assert reasons(session)[f"product={path}"] == HEAD
        with apply(ONLY.set(f"product={path}", "int8"), net) as session:
            assert session.products.elements[path] == "int8" and not reasons(session)


def test_narrow_layers_and_few_rows_multiply_where_a_rule_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_layers, "MIN_WIDTH", 256)
    monkeypatch.setattr(product_layers, "MIN_ROWS", 100)
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(20, 64)
    with apply(Plan().set("product=0", "int8").set("product=*", "e4m3fn"), net) as session:
        y = net(x)
        assert reasons(session) == {"product=1": NARROW}
        assert torch.equal(y, net[1](codes.row_linear(x, net[0].weight, net[0].bias, "int8")))
    monkeypatch.setattr(product_layers, "MIN_WIDTH", 16)
    with apply(ONLY, net) as session:
        assert torch.equal(net(x), net[1](net[0](x))) and reasons(session) == dict.fromkeys(("product=0", "product=1"), FEW_ROWS)
        assert "0 of 2 linear layers multiply" in repr(session.summary())


def test_rules_that_match_no_layer_are_an_error() -> None:
    for key in ("product=layer.*", "product=layers.0.w", "product=layers.0"):
        with pytest.raises(PlanError, match=f"rule '{key.replace('*', '.')}' matches no linear layer. Closest of"):
            apply(Plan().set(key, "int8"), Words())
    with apply(ONLY, nn.Sequential(nn.Conv2d(3, 3, 1))) as session:
        assert "no linear layers" in repr(session.changes)


def test_auto_takes_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with apply(Plan.preset("auto_products"), Words()) as session:
        assert set(session.products.elements.values()) == {"e4m3fn"}
    monkeypatch.setattr(product_layers, "reason_without", lambda element, device: "has none" if element == "e4m3fn" else "")
    with apply(Plan.preset("auto_products"), Words()) as session:
        assert set(session.products.elements.values()) == {"int8"}
    with pytest.raises(ApplyError, match=r"layer 'head': has none"):
        apply(FP8, Words())


# --- eager ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [FP8, ONLY, Plan.preset("int8_products")], ids=["fp8", "products alone", "int8"])
def test_gradients_are_near_those_of_the_unmodified_step(plan: Plan) -> None:
    net = Words()
    plain = words_step(net, net)
    with apply(plan, net, chunked_loss=False) as session:
        found = [words_step(net, net) for _ in range(2)]
        assert session.products.multiplied.keys() == {path for path, m in net.named_modules() if isinstance(m, nn.Linear)}
    assert_same(found[0], found[1])
    assert 0.002 < relative_error(found[0], plain) < NEAR
    assert_same(words_step(net, net), plain)  # closed


def test_nothing_about_it_is_silent() -> None:
    net = Words()
    with apply(FP8.set("product=head", None), net) as session:
        words_step(net, net)
        (row,) = [row for row in session.changes if row.reason == MULTIPLIED]
        assert row.slot == "layers.0.q and 13 other linear layers" and row.given == "product in e4m3fn"
        assert "14 of 14 linear layers multiply in e4m3fn" in repr(session.summary())
        assert "which changes forward" in session.plan.explain()
        assert not [row for row in session.changes if row.slot.endswith((":codes", ":scales"))]


def test_layers_that_read_one_tensor_save_its_codes_once() -> None:
    net, saved = Words(), list[Tensor]()
    with (
        apply(ONLY, net, chunked_loss=False),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
    ):
        net(tokens())
    of_codes = [t for t in saved if t.dtype is torch.float8_e4m3fn]
    assert (
        len(of_codes) == 15 and len({t.untyped_storage().data_ptr() for t in of_codes}) == 2 * 4 + 1
    )  # q k v, out, gate up, down; head


def test_copies_of_the_model_multiply_as_before() -> None:
    net = Words()
    with apply(ONLY, net):
        assert_same(step(copy.deepcopy(net), tokens(), loss=loss), step(Words(), tokens(), loss=loss))


def test_evaluation_multiplies_the_same_codes() -> None:
    net = Words()
    with apply(ONLY, net, chunked_loss=False):
        trained = net(tokens()).detach()
        with torch.no_grad():
            assert torch.equal(net.eval()(tokens()), trained)


def test_activation_checkpointing_recomputes_the_same_products() -> None:
    plain, net = Words(), Words(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    with apply(ONLY, plain, chunked_loss=False):
        expected = words_step(plain, plain)
    with apply(ONLY, net, chunked_loss=False):
        assert_same(words_step(net, net), expected)
    with apply(ONLY.recomputing("layers.*"), plain, chunked_loss=False):
        assert_same(words_step(plain, plain), expected)


def test_packed_weights_are_multiplied_in_the_dtype_of_the_model() -> None:
    net = Words()
    with apply(Plan.uniform(weight="int8/64@bf16", product="int8"), net) as session:
        words_step(net, net)
        assert all("stored packed" in reason for reason in reasons(session).values()) and len(reasons(session)) == 15


def test_training_follows_the_unmodified_one_with_a_packed_optimizer() -> None:
    losses: dict[str, list[float]] = {}
    state = Plan.uniform(gradient=INT8, moment1=INT8, moment2="uint8/64@bf16")
    for name, plan in {"plain": state, "fp8": state.set("product", "e4m3fn")}.items():
        net = Words()
        with apply(plan, net):
            optimizer = optim.AdamW(net.parameters(), lr=3e-3)
            for seed in range(8):
                value = cross_entropy(net(tokens(seed)).flatten(0, 1), tokens(seed).flatten())
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.setdefault(name, []).append(float(value.detach()))
    assert losses["fp8"] != losses["plain"] and losses["plain"][-1] < losses["plain"][0] - 1
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 0.05


def test_the_chunked_loss_is_that_of_all_logits() -> None:
    torch.manual_seed(0)
    net, x, target = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8192)), torch.randn(40, 64), torch.arange(40)
    found: list[list[Tensor]] = []
    for chunked in (False, True):
        with apply(ONLY, net, chunked_loss=chunked):
            net.zero_grad()
            cross_entropy(net(x), target).backward()
            found.append(gradients(net))
    assert relative_error(found[1], found[0]) < 1e-4


# --- compiled ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "int8_products"])
def test_compiled_steps_multiply_the_codes_of_eager_ones_and_pack_as_without(name: str, quick: None) -> None:
    stored: dict[str, int] = {}
    eager = Words()
    with apply(Plan.preset(name), eager, chunked_loss=False):
        expected = words_step(eager, eager)
    for way in (name, "activations8"):
        net = Words()
        with apply(Plan.preset(way), net, chunked_loss=False) as session:
            compiled = session.compile()
            found = words_step(compiled, net)
            stored[way] = sum(report.stored_bytes for report in session._compiled.reports)  # type: ignore[union-attr]
            if way == name:
                assert relative_error(found, expected) < NEAR / 2
                assert len(session.products.multiplied) == 15 and not reasons(session)
                assert not [row for row in session.changes if "nothing is known" in row.reason or "enlarge" in row.reason]
                names = session._compiled.decisions  # type: ignore[union-attr]
                assert any(
                    {"layers.1.q:input", "layers.1.k:input", "layers.1.v:input"} <= set(d.slot.names) for d in names.values()
                )
                with torch.no_grad():
                    net.eval()
                    before = compiled(tokens())
                assert_same([before], [eager_logits(Plan.preset(name), net)])
    assert stored[name] <= stored["activations8"]  # codes are made again from what is packed anyway


def test_inductor_compiles_products_of_packed_inputs_for_a_cpu() -> None:
    """Its own kernels: with more tokens than inputs, it failed to fuse the decoding of an input with the transposition of codes."""
    net, x = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)), torch.randn(256, 128)
    with apply(FP8, net):
        eager = step(net, x)
    with apply(FP8, net) as session:
        found = step(session.compile(), x)
        assert len(session.products.multiplied) == 2 and session._compiled.reports[0].stored_bytes  # type: ignore[union-attr]
    assert relative_error(found, eager) < NEAR / 2


def eager_logits(plan: Plan, net: nn.Module) -> Tensor:
    other = Words()
    other.load_state_dict(net.state_dict())
    with apply(plan, other.eval()), torch.no_grad():
        return other(tokens())


def test_a_compiled_step_without_rules_for_activations_saves_codes_or_their_sources(quick: None) -> None:
    net = Words()
    plain = words_step(net, net)
    with apply(ONLY, net, chunked_loss=False) as session:
        found = words_step(session.compile(), net)
        assert 0.002 < relative_error(found, plain) < NEAR and len(session.products.multiplied) == 15


@pytest.mark.parametrize("rows", [33, 40, 48])
def test_compiled_products_of_any_number_of_rows_are_those_of_eager_mode(rows: int, quick: None) -> None:
    """Rows that are no multiple of 16 are padded; forward may save their codes in the middle of that."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(SIZE, 32, bias=False)), torch.randn(rows, SIZE)
    found: list[list[Tensor]] = []
    for compiles in (False, True):
        net.zero_grad()
        with apply(ONLY.set("product=0", "e4m3fn"), net) as session:
            model = session.compile() if compiles else net
            model(x).square().sum().backward()
            found.append([p.grad for p in net.parameters() if p.grad is not None])
    assert_same(*found)


def test_layers_outside_of_the_compiled_graphs_have_a_reason(quick: None) -> None:
    net = Words()
    with apply(ONLY, net, chunked_loss=False) as session:
        compiled = session.compile()
        net.layers[1].q = nn.Identity()
        compiled(tokens()).sum().backward()
        assert reasons(session) == {"product=layers.1.q": product_layers.NOT_IN_GRAPHS}


def test_plain_compilation_of_a_model_with_a_session_is_a_reason(quick: None) -> None:
    net = Words()
    with apply(ONLY, net, chunked_loss=False) as session:
        torch.compile(net, backend="eager")(tokens())
        assert set(reasons(session).values()) == {product_layers.COMPILED}


# --- what else reads plans -----------------------------------------------------------------------------------------------------------


def test_simulate_mode_refuses_products() -> None:
    with pytest.raises(ApplyError, match=r"multiplies 8-bit codes.*plan.without\('product'\)"):
        apply(FP8, Words(), mode="simulate")


def test_verify_compares_with_the_model_without_products() -> None:
    net = Words()
    batch = tokens(), tokens().flatten()
    found = verify(net, batch, FP8, loss=words_loss)
    assert (
        found.ok
        and found.exact_tolerance == 0
        and any("compared with those of the model without them" in note for note in found.notes)
    )
    error = max(row.error for row in found.rows)
    assert error > 3 * max(row.error for row in verify(net, batch, Plan.preset("activations8"), loss=words_loss).rows)
    wrong = verify(net, batch, FP8, loss=words_loss, tolerance=error / 2)
    assert not wrong.ok and "products" in repr(wrong)


def test_footprints_say_what_they_count() -> None:
    trace = trace_step(Words(), (tokens(), tokens()), loss=lambda y, t: cross_entropy(y.flatten(0, 1), t.flatten()))
    found = footprint(trace, FP8)
    assert found.peak_bytes == footprint(trace, Plan.preset("activations8")).peak_bytes
    assert any("multiply in 8 bits are counted as" in note for note in found.notes)
    assert found.step_time == "calibrations have no products in 8 bits."


def test_kernels_transpose_the_codes_of_inputs_in_backward(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where Inductor would fuse the transposes into reductions; here the operation is the reference."""
    calls: list[int] = []
    found: list[list[Tensor]] = []
    reference = graph_products.finish_products

    def counted(backward: Any) -> None:
        reference(backward)
        calls.append(sum("transposed_codes" in str(node.target) for node in backward.graph.nodes))

    monkeypatch.setattr(graph_packing, "finish_products", counted)
    monkeypatch.setattr(graph_products.backend, "find_kernels", lambda: graph_products)
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(graph_products, "DEVICES", devices)
        net = Words()
        with apply(FP8, net, chunked_loss=False) as session:
            found.append(words_step(session.compile(), net))
    assert_same(*found)
    assert calls == [0, 8]  # of each layer: the input of q, k and v, that of out, of gate and up, of down


def test_products_of_a_graph_read_the_same_ones() -> None:
    """They stand for the scales of the second operand; without a node of their own Inductor writes them for each product."""
    graph = torch.fx.Graph()
    a, b, scales = (graph.placeholder(name) for name in ("a", "b", "scales"))
    ones = graph.call_function(torch.ops.aten.full.default, ([1, 32], 1.0))
    product = torch.ops.aten._scaled_mm.default
    found = [graph.call_function(product, (a, b, scales, ones)) for _ in range(3)]
    other = graph.call_function(torch.ops.aten.neg.default, (ones,))
    graph.output((*found, other))
    graph_products.share_ones(graph)
    graph.lint()
    (shared,) = graph.find_nodes(op="call_function", target=torch.ops.paredown.in_memory.default)
    assert [node.args[3] for node in found] == [shared] * 3 and shared.args == (ones,) and other.args == (ones,)
    assert torch.equal(torch.ops.paredown.in_memory(torch.ones(2)), torch.ones(2))
