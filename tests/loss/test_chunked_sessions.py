"""Sessions with a chunked loss: Hugging Face models, packed weights, optimizers, traces, and the heads that are left unmodified."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown
from paredown import Plan, Role, footprint, trace_step
from paredown.errors import ApplyError, BudgetError, PlanError
from paredown.loss import chunked_loss
from paredown.loss.chunked_cross_entropy import CHUNK_BYTES
from paredown.loss.output_head import ADAPTED, OutputHead, find_head
from tests.loss.largest import LargestTensor
from tests.loss.test_deferred_logits import NUM_CLASSES, Model, flat, step, tokens
from tests.predict.steps import peak_bytes
from tests.programs.compiling import compiles_quickly

apply = partial(paredown.apply, chunked_loss=True)
INT8 = "int8/64@bf16"
IN_SESSION = Plan().set("activation", None)  # which packs nothing
LENGTH = 32
WIDTH = 8
PLANS = {
    "empty": Plan.uniform(),
    "activations": Plan.uniform(activation="fp32"),
    "weights": Plan.uniform(weight=INT8),
    "checkpointed": Plan(recompute=("layer",)),
}


class Layers(nn.Module):
    """An embedding, a layer and a head that shares the embedding's weight."""

    def __init__(self, num_classes: int = NUM_CLASSES, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(num_classes, width), nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, num_classes, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids)))


def head_rows(session: Any) -> list[Any]:
    return [change for change in session.changes if change.asked == "a chunked loss"]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plain_loops(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * NUM_CLASSES * 4)
    with apply(plan, (model := Layers()), chunked_loss=False) as session:
        expected = step(model, flat)
        assert not head_rows(session) and session._head.use.num_losses == 0
    with apply(plan, (model := Layers())) as session, LargestTensor() as seen:
        found = step(model, flat)
    torch.testing.assert_close(found, expected)
    assert session._head.use.num_losses == 1 and not head_rows(session)
    assert seen.rows_of(NUM_CLASSES) == WIDTH  # the transposed weight; chunks have 2 rows, and all logits 15
    assert type(model(tokens())) is Tensor, "the session is closed"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_packed_head_is_decoded_in_the_dtype_of_its_products_alone(is_frozen: bool) -> None:
    """A copy in float32, which the loss held from its first chunk to its last, was in no prediction."""
    plans, ids, peaks = (IN_SESSION, Plan.uniform(weight="bf16", frozen="bf16")), torch.randint(64, (1, 64)), list[int]()
    found = list[list[Tensor]]()
    for plan in plans:
        model = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, NUM_CLASSES, bias=False))
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape).bfloat16() / 16)
        model[1].weight.requires_grad_(not is_frozen)
        with apply(plan, model), torch.autocast("cpu", torch.bfloat16):
            peaks.append(peak_bytes(model, (ids, ids), flat))
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert peaks[1] < peaks[0] + 2 * NUM_CLASSES * 256  # of bytes, and a copy in float32 has twice as many
    assert len(found[0]) == 2 - is_frozen
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":  # its head is tied
        config = transformers.GPT2Config(vocab_size=NUM_CLASSES, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, **ids)
        return transformers.GPT2LMHeadModel(config).train()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=NUM_CLASSES, **sizes, **ids)).train()


@pytest.mark.filterwarnings("ignore")  # its own
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_with_labels(kind: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2 * NUM_CLASSES * 4)
    ids = torch.randint(NUM_CLASSES, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.where(ids < 1000, -100, ids)

    def run(model: Any) -> list[Tensor]:
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=50).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = run(hugging_face(kind))
    model = hugging_face(kind)
    with apply(Plan.uniform(), model) as session, LargestTensor() as seen:
        found = run(model)
        assert not session.changes and session._head.use.num_losses == 1
        assert seen.numel == NUM_CLASSES * 16  # the weight; all logits are 64 rows of this many classes
        generated = model.eval().generate(ids[:, :4], max_new_tokens=2, do_sample=False)
        assert not session.changes
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype
        assert (mine - theirs).norm() <= (0.02 if autocast else 1e-5) * theirs.norm()
    assert torch.equal(generated, hugging_face(kind).eval().generate(ids[:, :4], max_new_tokens=2, do_sample=False))


@pytest.mark.parametrize("is_chunked", [True, False])
def test_integrations_can_turn_it_off(is_chunked: bool) -> None:
    hugging_face = pytest.importorskip("paredown.integrations.hugging_face", reason="transformers is not installed")
    callback = hugging_face.TrainerPlanCallback(Plan.uniform(), chunked_loss=is_chunked)
    callback.put_on(model := Model())
    assert (type(model(tokens())) is not Tensor) == is_chunked
    callback.session.close()


def test_changes_name_what_read_the_logits() -> None:
    with apply(Plan.uniform(), (model := Model())) as session:
        logits = model(tokens())
        flat(logits, tokens()).backward()
        logits.argmax(-1)
        (change,) = head_rows(session)
    assert (change.slot, change.given) == ("head", "all logits") and "argmax" in change.reason
    assert head_rows(session) == [change], "of a closed session too"


@pytest.mark.parametrize("plan", [Plan.uniform(), Plan.uniform(weight=INT8)], ids=["plain", "packed"])
def test_updates_by_our_optimizer_are_noticed(plan: Plan) -> None:
    with apply(plan, (model := Layers())):
        optimizer = paredown.optim.AdamW(model.parameters(), lr=0.01)
        for is_read in (True, False):
            logits = model(tokens())
            flat(logits, tokens()).backward()
            if is_read:
                logits.argmax(-1)
            optimizer.step()
            optimizer.zero_grad()
            if is_read:
                logits.softmax(-1)
        with pytest.raises(RuntimeError, match="its weight changed"):
            logits.argmax(-1)


def test_plans_for_the_slots_of_the_head() -> None:
    """A plan for the unmodified model may name tensors that a chunked loss does not save."""
    for key in ("activation=head:input", "activation=head:*"):
        with apply(Plan.uniform().set(key, INT8), (model := Model())) as session:
            step(model, flat)
            assert [row.given for row in session.changes] == ["nothing"], "no other rule of the plan packs a tensor"
        with apply(Plan.uniform().set(key.replace("head", "tail"), INT8), model), pytest.raises(PlanError, match="tail"):
            step(model, flat)


# --- heads that are left unmodified ------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """An adapter as PEFT's: a frozen layer and two of low rank."""

    def __init__(self, layer: nn.Linear, *, scale: float = 1.0, has_bias: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scale = layer, scale
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=has_bias)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scale


def test_adapters_are_left_unmodified() -> None:
    model = Model()
    model.head = Adapter(model.head, has_bias=True)  # type: ignore[assignment]
    with apply(Plan.uniform(), model) as session:
        assert type(model(tokens())) is Tensor
        (change,) = head_rows(session)
    assert (change.given, change.reason) == ("unmodified", ADAPTED)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [True, False])
def test_lora_on_the_head_is_in_chunks(frozen: bool, reduction: str) -> None:
    """Losses and gradients of a head with adapters, of hidden states too; other sums and all logits are as without a session."""
    ids, found = tokens(), list[list[Tensor]]()
    for is_chunked in (False, True):
        torch.manual_seed(0)
        model = Model()
        model.head = Adapter(model.head, scale=0.5)  # type: ignore[assignment]
        model.head.base_layer.weight.requires_grad_(not frozen)  # type: ignore[union-attr]
        with apply(Plan.uniform(), model, chunked_loss=is_chunked) as session:
            logits = model(ids).float()
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)
            loss.sum().backward()
            assert session._head.use.num_losses == is_chunked and not head_rows(session)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([loss.detach(), logits.argmax(-1).float(), (model(ids) + 1.0).detach(), *gradients])
    assert len(found[0]) == len(found[1]) > 4
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)


def test_the_trace_of_lora_on_the_head_has_no_logits() -> None:
    model = Model()
    model.head = Adapter(model.head)  # type: ignore[assignment]
    trace = trace_step(model, (tokens(), tokens()), loss=flat, device="cpu", chunked_loss=True)
    assert (
        trace.unmodified is not None and footprint(trace, Plan().set("activation", None)).peak_bytes < footprint(trace).peak_bytes
    )


def test_subclasses_and_sharded_models_are_left_unmodified() -> None:
    class Other(nn.Linear):
        """Not nn.Linear."""

    class Sharded(Model):
        """What fully_shard adds to a class."""

        def reshard(self) -> None: ...

    model = Model()
    model.head = Other(4, NUM_CLASSES)
    with apply(Plan.uniform(), model) as session:
        assert type(model(tokens())) is Tensor
        assert "Other, not nn.Linear" in head_rows(session)[0].reason
    with apply(Plan.uniform(), (model := Sharded())) as session:
        assert type(model(tokens())) is Tensor
        assert "fully_shard" in head_rows(session)[0].reason


def test_a_compiled_loss_reads_deferred_logits() -> None:
    model = Model()
    expected = step(model, flat)
    with compiles_quickly(), chunked_loss(model) as head:
        torch.testing.assert_close(step(model, torch.compile(flat, backend="eager")), expected)
    assert head.use.num_losses == 1


def test_which_layer_is_the_head() -> None:
    class Mixture(nn.Module):
        """Linear layers in the order of `widths`: (inputs, outputs), the first two repeated."""

        def __init__(self, *sizes: tuple[int, int]) -> None:
            super().__init__()
            with torch.device("meta"):
                layers = [nn.Linear(*size) for size in sizes]
            self.layers = nn.ModuleList(layers[:2])
            self.rest = nn.Sequential(*layers[2:])

    wide = (64, 16384), (8192, 64)  # a gate and its input in one layer
    assert find_head(Mixture(*wide, (64, 8192)))[0] == ""  # another layer has 8192 inputs
    assert find_head(Mixture(*wide, (64, 8193)))[0] == "rest.0"
    assert find_head(Mixture(*wide, (64, 8191)))[0] == ""
    assert find_head(Mixture(*wide, (5000, 9999)))[0] == ""
    assert find_head(Mixture(*wide, (64, 9000), (64, 9001), (64, 5)))[0] == "rest.1"
    assert find_head(nn.Linear(2, NUM_CLASSES))[1] is None
    with pytest.raises(ApplyError, match=r"Mixture has no output head.*8192 outputs"), chunked_loss(Mixture(*wide)):
        pass
    assert not list(OutputHead(Mixture(*wide)).rows())


# --- traces -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_traces_predict_chunks(device: str, autocast: torch.dtype | None) -> None:
    with torch.device("meta"):
        model, ids = Layers(), torch.empty(16, 2048, dtype=torch.int64)
    options: Any = {"loss": flat, "device": device, "autocast": autocast}
    plain = trace_step(model, (ids, ids), **options, chunked_loss=False)
    chunked = trace_step(model, (ids, ids), **options, chunked_loss=True)
    assert chunked.unmodified == plain and footprint(chunked).peak_bytes == footprint(plain).peak_bytes, (
        "the baseline has all logits"
    )
    dtype = "bfloat16" if autocast is not None else "float32"
    bytes_of_logits = ids.numel() * NUM_CLASSES * (2 if autocast is not None else 4)
    assert max(output.nbytes for output in plain.outputs) >= bytes_of_logits
    products = [output for output in chunked.outputs if output.op == "mm" and output.shape[-1] == NUM_CLASSES]
    limit = CHUNK_BYTES.get(device, 2**25)
    assert {output.dtype for output in products} == {dtype} and {output.nbytes for output in products} == {limit}
    assert footprint(chunked, IN_SESSION).peak_bytes < footprint(plain).peak_bytes - bytes_of_logits
    assert max(slot.nbytes for slot in chunked.slots) < bytes_of_logits
    held = {slot.nbytes for slot in chunked.slots if slot.name.endswith(".held")}
    assert ids.numel() * WIDTH * (2 if autocast is not None else 4) in held, "the gradient of the hidden states"
    (gradient,) = (slot for slot in chunked.slots if slot.role is Role.GRADIENT and slot.name == "embedding.weight")
    assert NUM_CLASSES * WIDTH * 4 not in held or gradient.birth > chunked.backward_at, "a gradient is counted once"


def test_sessions_do_not_change_traces() -> None:
    model = Layers()
    plain = trace_step(model, (tokens(), tokens()), loss=flat, device="cpu")
    with apply(Plan.uniform(), model):
        assert trace_step(model, (tokens(), tokens()), loss=flat, device="cpu") == plain


def test_traces_without_chunks() -> None:
    """Where a session has all logits, so has the trace: in evaluation, without a head, with an adapter, and if a function reads them."""

    def read(logits: Tensor, labels: Tensor) -> Tensor:
        return flat(logits.softmax(-1), labels)

    adapted = Model()
    adapted.head = Adapter(adapted.head, has_bias=True)  # type: ignore[assignment]
    for model, loss, reason in (
        (Model().eval(), flat, "no cross entropy reads them"),
        (nn.Linear(4, 8), nn.functional.mse_loss, ""),
        (adapted, flat, "target_modules"),
        (Model(), read, "no cross entropy reads them"),
    ):
        batch = (torch.empty(2, 4), torch.empty(2, 8)) if type(model) is nn.Linear else (tokens(), tokens())
        traces = [trace_step(model, batch, loss=loss, device="cpu", chunked_loss=is_on) for is_on in (False, True)]
        assert traces[0] == replace(traces[1], notes=traces[0].notes) and traces[1].unmodified is None
        assert [reason in note for note in traces[1].notes[len(traces[0].notes) :]] == [True] * bool(reason)


class WithoutHead(nn.Module):
    """Logits by a matrix product with a parameter, and their loss."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(64, 16), nn.Parameter(torch.randn(num_classes, 16))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = nn.functional.linear(self.embed(ids), self.table).flatten(0, -2)
        return {"loss": nn.functional.cross_entropy(logits, ids.flatten())}


def test_a_head_that_is_not_found_has_a_sentence_with_numbers() -> None:
    ids = torch.randint(64, (3, 20))
    said = r"no output head was found for 60 x 8,192 logits \(1.88 MiB\).*at least 8192 outputs.*chunked_cross_entropy"
    for num_classes, is_on, has_note in ((8192, True, True), (8192, False, False), (4096, True, False)):
        model = WithoutHead(num_classes)
        notes = trace_step(model, {"ids": ids}, device="cpu", chunked_loss=is_on).notes
        with apply(Plan.preset("activations8"), model, chunked_loss=is_on) as session:
            model(ids)["loss"].backward()
            reasons = [row.reason for row in session.changes if row.asked == "a chunked loss"]
        for texts in (notes, reasons):
            assert [bool(re.search(said, text)) for text in texts] == [True] * has_note
    many = nn.Linear(4, 8)  # more rows than a head has classes
    trace = trace_step(
        many, (torch.empty(9000, 4), torch.zeros(9000, dtype=torch.int64)), loss=nn.functional.cross_entropy, device="cpu"
    )
    assert not trace.notes


@pytest.mark.parametrize("is_chunked", [True, False])
def test_plans_within_budgets_that_the_logits_exceed(is_chunked: bool) -> None:
    with torch.device("meta"):
        model, ids = Layers(), torch.empty(16, 2048, dtype=torch.int64)
    trace = trace_step(model, (ids, ids), loss=flat, device="cuda", autocast=torch.bfloat16, chunked_loss=is_chunked)
    if is_chunked:
        plan = paredown.assign(trace, "1.5GiB")
        assert footprint(trace, plan).peak_bytes <= 1.5 * 2**30 < footprint(trace).peak_bytes and not plan.changes_nothing
    else:
        with pytest.raises(BudgetError):
            paredown.assign(trace, "1.5GiB")


# --- gradients ------------------------------------------------------------------------------------------------------------------------


def test_a_second_derivative_is_refused() -> None:
    """The gradients are computed in forward, and have no graph."""
    model, ids = Layers(), tokens()
    with paredown.apply(Plan.uniform(), model):
        loss = flat(model(ids), ids)
        with pytest.raises(RuntimeError, match=r"no second derivative.*chunked_loss=False"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_gradients_are_zero_where_all_targets_are_ignored() -> None:
    """As torch's: the mean of no rows is NaN, and its gradients are 0."""
    model, ids = Layers(), tokens()
    with paredown.apply(Plan.uniform(), model):
        loss = flat(model(ids), torch.full_like(ids, -100))
        loss.backward()
    assert loss.isnan() and all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_head_with_a_backward_hook_computes_all_logits() -> None:
    """torch's full backward hooks do not take deferred logits."""
    model, ids, seen = Layers(), tokens(), list[Any]()
    model.head.register_full_backward_hook(lambda module, of_input, of_output: seen.append(of_output[0].shape))
    with paredown.apply(Plan.uniform(), model) as session:
        flat(model(ids), ids).backward()
        assert "a full backward hook reads the gradient of its output" in str(session.changes)
    assert [tuple(shape) for shape in seen] == [(*ids.shape, NUM_CLASSES)]
