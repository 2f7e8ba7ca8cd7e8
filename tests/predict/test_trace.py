"""Traces against real steps: the same saved bytes and slot names; the model is left unchanged."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from paredown.autograd.module_watch import Watch
from paredown.autograd.operations import Use
from paredown.check.verify import verify
from paredown.errors import TraceError
from paredown.models import MODELS
from paredown.plan.plan import Plan
from paredown.plan.trace import Trace
from paredown.predict.trace_step import trace_step
from paredown.roles import Role
from tests.predict.steps import names_of, saved_bytes, step_of, traced

WIDE = 4096  # values of a tensor that is large enough to be packed, one row
X = torch.ones(2, WIDE)


def kept(trace: Trace, role: Role = Role.ACTIVATION) -> int:
    """Bytes of a role, every storage once."""
    slots = trace.of(role)
    return sum({(s.storage if s.storage != -1 else s.name): s.nbytes for s in slots}.values())


def names(trace: Trace) -> set[str]:
    """The names of all savers inside of the model."""
    return {name for slot in trace.activations for name in slot.names if not name.startswith("loss:")}


class Parts(nn.Module):
    """A module with the given forward."""

    def __init__(self, forward, **parts: nn.Module) -> None:
        super().__init__()
        self._forward = (forward,)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self._forward[0](self, *args)


def trace(model: nn.Module, batch=None, *, loss=mse_loss, device: str = "cpu", **options) -> Trace:
    """The trace of a step, by default on (2, WIDE) values."""
    return trace_step(model, (X, X) if batch is None else batch, loss=loss, device=device, **options)


# --- against real steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num", [2, 5])
def test_saved_bytes_are_those_of_a_real_step(name: str, num: int) -> None:
    real = saved_bytes(*step_of(name, num))
    if name == "lstm":  # oneDNN's workspace, whose size is known roughly
        assert kept(traced(name, num)) == pytest.approx(real, rel=0.03)
    else:
        assert kept(traced(name, num)) == real


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_a_real_step_on_every_device_and_batch_size(name: str) -> None:
    model, batch, _ = step_of(name)
    real = names_of(model, batch)
    small = names(traced(name, 3))
    assert names(traced(name, 4)) == real == small
    on_cuda = names(traced(name, 4, device="cuda"))
    assert {n for n in on_cuda if not n.startswith("lstm:")} == {n for n in real if not n.startswith("lstm:")}


def test_weights_gradients_and_moments_are_counted_once() -> None:
    result = traced("gpt", optimizer="adamw")  # the head is the embedding
    model = step_of("gpt")[0]
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    for role in (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2):
        assert kept(result, role) == nbytes
    assert kept(result, Role.INPUT) == 2 * 4 * 64 * 8


def test_times_are_in_order() -> None:
    result = traced("resnet18")
    for slot in result.activations:
        assert slot.birth <= slot.dropped <= slot.death <= result.length
        for part in slot.parts:
            assert slot.birth <= part.packed <= part.released <= slot.death
            assert all(result.backward_at <= start <= end <= slot.death for start, end in part.decoded)
    grads = result.of(Role.GRADIENT)
    assert all(slot.birth > result.backward_at for slot in grads)
    assert {made.phase for made in result.outputs} == {"forward", "loss", "backward"}


def test_one_storage_is_one_slot_named_after_the_saver_that_needs_values() -> None:
    slot = traced("resnet18").slot("relu:output")
    assert slot.name == "layer1.0.conv1:input"
    assert slot.names == ("relu:output", "layer1.0.conv1:input")
    assert slot.uses == {Use.SIGN, Use.VALUE}
    assert slot.recomputed_from == "bn1:input"


# --- nothing is changed --------------------------------------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> list[object]:
    """What must not change: tensors as objects and in value, attributes, hooks, random states."""
    tensors = [(name, id(t), t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())]
    inside = [sorted((name, id(value)) for name, value in vars(module).items()) for module in model.modules()]
    hooks = [[len(h) for h in (module._forward_hooks, module._forward_pre_hooks)] for module in model.modules()]
    states = [torch.get_rng_state().tolist(), random.getstate(), [p.grad is None for p in model.parameters()]]
    return [[(n, i, t.tolist()) for n, i, t in tensors], inside, hooks, states, [m.training for m in model.modules()]]


@pytest.mark.parametrize("name", ["resnet18", "lstm", "gpt"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_model_is_unchanged_afterwards(name: str, device: str) -> None:
    model, batch, loss = step_of(name, 2)
    before, held = fingerprint(model), [t.clone() for t in batch]
    trace_step(model, batch, loss=loss, device=device, autocast=torch.bfloat16 if device == "cuda" else None)
    assert fingerprint(model) == before
    assert all(torch.equal(a, b) for a, b in zip(batch, held, strict=True))
    loss(model(batch[0]), batch[1]).backward()


def test_a_trace_holds_neither_model_nor_weights() -> None:
    model = nn.Linear(WIDE, 8)
    result, model_ref = trace(model, (X, torch.ones(2, 8))), weakref.ref(model)
    del model
    gc.collect()
    assert model_ref() is None and result.activations


def test_the_model_is_unchanged_after_an_error_too() -> None:
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.fc(x))
        self.last = x
        raise ZeroDivisionError("in the model")

    model = Parts(forward, fc=nn.Linear(WIDE, 8), norm=nn.BatchNorm1d(8))
    model.seen = []
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError, match="in the model"):
        trace(model)
    assert fingerprint(model) == before
    assert model.seen == [] and not hasattr(model, "last")
    assert torch.is_grad_enabled() and torch.ones(1).device.type == "cpu" and type(torch.ones(1)) is Tensor


def test_hooks_of_a_session_are_not_run_and_stay() -> None:
    model, seen = nn.Linear(WIDE, WIDE), []
    watch = Watch(model, seen.append)
    watch.attach()
    trace(model)
    assert not seen
    model(X.requires_grad_()).sum().backward()
    X.requires_grad_(False)
    assert seen
    watch.detach()


def test_tracing_under_no_grad_and_in_another_default_dtype_works() -> None:
    with torch.no_grad():
        assert kept(trace(nn.Sequential(nn.Linear(WIDE, 8), nn.Linear(8, WIDE)))) > 0


# --- models of all kinds -------------------------------------------------------------------------------------------------------


def test_meta_models_and_meta_batches() -> None:
    with torch.device("meta"):
        model, batch = (
            nn.Sequential(nn.Linear(WIDE, 64), nn.ReLU(), nn.Linear(64, WIDE)),
            (torch.ones(128, WIDE), torch.ones(128, WIDE)),
        )
    real = nn.Sequential(nn.Linear(WIDE, 64), nn.ReLU(), nn.Linear(64, WIDE))
    result = trace(model, batch)
    assert result == trace(real, tuple(torch.ones(128, WIDE) for _ in range(2)))
    assert all(p.is_meta for p in model.parameters())


def test_frozen_parts_have_neither_gradient_nor_state() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 8), nn.Linear(8, WIDE))
    model[0].requires_grad_(False)
    result = trace(model, optimizer="sgdm")
    assert {slot.name for slot in result.of(Role.GRADIENT)} == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert {slot.name for slot in result.of(Role.MOMENT1)} == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert "0:input" not in names(result)


def test_a_mapping_is_keywords_and_its_output_has_the_loss() -> None:
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.fc(x)
        return {"loss": y.square().mean(), "more": y}

    class Model(Parts):
        def forward(self, *, x: Tensor) -> dict[str, Tensor]:
            return forward(self, x)

    result = trace(Model(forward, fc=nn.Linear(WIDE, WIDE)), {"x": X}, loss=None)
    assert result.slot(":pow.input").stays  # the caller gets it
    assert result.returned_bytes == 2 * WIDE * 4 and "assumed freed" in result.notes[0]
    assert kept(trace(Parts(lambda self, x: self.fc(x).sum(), fc=nn.Linear(WIDE, 2)), (X,), loss=None)) == 0


def test_outputs_of_the_model_are_not_packed() -> None:
    result = trace(Parts(lambda self, x: self.fc(x).relu(), fc=nn.Linear(WIDE, WIDE)))
    slot = result.slot(":relu.output")
    assert "loss:MseLoss.self" in slot.names and "held outside of autograd" in slot.stays


def test_in_place_operations_share_one_slot() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(inplace=True), nn.Linear(WIDE, WIDE))
    slot = trace(model).slot("2:input")
    assert slot.names == ("1:output", "2:input")


def test_custom_functions_are_named_after_themselves() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    slot = trace(Parts(lambda self, x: Square.apply(self.fc(x)), fc=nn.Linear(WIDE, WIDE))).slot(":Square.saved1")
    assert slot.pin is not None and slot.pin.significant_bits == 7 and not slot.stays


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_store_their_input_only(reentrant: bool) -> None:
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))

    def model() -> Parts:
        inner = nn.Sequential(nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, 8))
        return Parts(forward, first=nn.Linear(WIDE, 8), inner=inner, last=nn.Linear(8, WIDE))

    batch = (torch.ones(512, WIDE), torch.ones(512, WIDE))
    result = trace(model(), batch)
    assert kept(result) == saved_bytes(model(), batch, mse_loss)
    assert [slot.name for slot in result.activations if slot.module.startswith("inner")] == ["inner:checkpoint.input"]
    recomputed = [made for made in result.outputs if made.op == "tanh" and made.phase == "backward"]
    assert len(recomputed) == 1
    assert any("hooks" in note for note in result.notes) != reentrant


def test_a_module_called_twice_has_two_slots() -> None:
    result = trace(Parts(lambda self, x: self.fc(self.fc(x)), fc=nn.Linear(WIDE, WIDE)))
    assert names(result) == {"fc@2:input"}  # the first call saves the batch, which the caller holds


def test_tensors_that_no_module_registers_are_buffers() -> None:
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale) + self.more[0]

    model = Parts(forward, fc=nn.Linear(WIDE, WIDE))
    model.scale, model.more = torch.ones(WIDE), [torch.ones(WIDE)]
    result = trace(model)
    assert names(result) == {"fc:input"}
    assert [(slot.name, slot.nbytes) for slot in result.of(Role.BUFFER)] == [("constant1", 4 * WIDE), ("constant2", 4 * WIDE)]
    assert type(model.scale) is Tensor


def test_small_views_of_a_large_storage_are_slots_that_share_it() -> None:
    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.fc(x).chunk(4, dim=-1)
        return a.sigmoid() * b.tanh() + c * d

    result = trace(Parts(forward, fc=nn.Linear(WIDE, 4 * WIDE)), (X, X))
    products = [slot for slot in result.activations if slot.module == "" and slot.savers[0].op == "mul"]
    whole = [slot for slot in products if slot.nbytes == 4 * 2 * WIDE * 4]
    assert len(whole) == 2 and len({slot.storage for slot in whole}) == 1
    assert [slot.numel for slot in whole] == [2 * WIDE, 2 * WIDE]
    assert kept(result) == (4 + 1 + 1 + 1) * 2 * WIDE * 4  # the storage of c and d, sigmoid, tanh, the output that the loss saves


def test_a_compiled_module_is_traced_uncompiled() -> None:
    model = nn.Sequential(nn.Linear(WIDE, 8), nn.Linear(8, WIDE))
    plain = trace(model)
    assert trace(torch.compile(model, backend="eager")) == plain
    model.compile(backend="eager")
    assert trace(model) == plain


# --- optimizers ----------------------------------------------------------------------------------------------------------------


def moments(optimizer, model: nn.Module, **options) -> dict[tuple[str, str], tuple[int, ...]]:
    result = trace(model, optimizer=optimizer, **options)
    return {(slot.role.value, slot.name): slot.shape for slot in result.slots if slot.role in (Role.MOMENT1, Role.MOMENT2)}


def test_state_of_optimizer_instances_comes_from_a_step_on_a_tiny_parameter() -> None:
    model = nn.Linear(WIDE, 16, bias=False)
    batch = (X, torch.ones(2, 16))
    both = {("moment1", "weight"): (16, WIDE), ("moment2", "weight"): (16, WIDE)}
    assert moments(torch.optim.AdamW(model.parameters()), model, batch=batch) == both
    assert moments(torch.optim.SGD(model.parameters(), lr=1, momentum=0.9), model, batch=batch) == {
        ("moment1", "weight"): (16, WIDE)
    }
    assert moments(torch.optim.SGD(model.parameters(), lr=1), model, batch=batch) == {}
    shapes = moments(torch.optim.Adafactor(model.parameters()), model, batch=batch)
    assert sorted(shapes.values()) == [(1, WIDE), (16, 1)]
    assert model.weight.grad is None


def test_a_foreach_step_needs_a_copy_of_the_parameters() -> None:
    model, batch = nn.Linear(WIDE, 16, bias=False), (X, torch.ones(2, 16))
    for options, nbytes in (({}, 4 * 16 * WIDE), ({"fused": True}, 0), ({"foreach": False}, 4 * 16 * WIDE)):
        result = trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), **options), device="cuda")
        assert sum(made.nbytes for made in result.outputs if made.phase == "step") == nbytes


def test_an_optimizer_whose_step_fails_on_a_tiny_parameter_is_a_note() -> None:
    class Broken(torch.optim.AdamW):
        def step(self, closure=None):
            raise RuntimeError("needs a GPU")

    model = nn.Linear(WIDE, 16)
    result = trace(model, (X, torch.ones(2, 16)), optimizer=Broken(model.parameters()))
    assert any("Broken" in note and "needs a GPU" in note for note in result.notes)


# --- errors --------------------------------------------------------------------------------------------------------------------


def test_errors_of_the_model_get_a_note() -> None:
    with pytest.raises(RuntimeError) as error:
        trace(nn.Sequential(nn.Linear(8, 8)), (X, X))
    assert "paredown: in the traced forward of module '0'" in error.value.__notes__[0]


def test_a_batch_that_forward_does_not_take_raises_a_sentence() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(TraceError) as error:
        trace_step(model, (X, X), device="cpu")
    assert str(error.value) == (
        "Linear.forward(input) cannot be called with 2 positional arguments: too many positional arguments. There is no loss, so the model "
        "is called with all 2 parts of the batch; if the last one is the target, pass the loss that takes it: "
        "trace_step(..., loss=torch.nn.functional.cross_entropy)."
    )
    with pytest.raises(TraceError, match=r"Linear\.forward\(input\) cannot be called with the keywords x, labels: .*'input'\.$"):
        trace_step(model, {"x": X, "labels": X}, device="cpu")
    with pytest.raises(TypeError, match="unsupported operand"):  # an error inside of the model stays what it was
        trace_step(Parts(lambda self, x: x + "1", fc=model), (X,), device="cpu")


def test_wrong_arguments_raise_trace_error() -> None:
    model = nn.Linear(WIDE, WIDE)
    with pytest.raises(TraceError, match="Add the target"):
        trace(model, (X,))
    with pytest.raises(TraceError, match=r"a tensor of shape \(2, 4096\). Pass a loss"):
        trace(model, (X,), loss=None)
    with pytest.raises(TraceError, match="Allowed: sgd, sgdm, adam, adamw, lion, muon"):
        trace(model, optimizer="adagrad")
    with pytest.raises(TraceError, match="Allowed: cuda, cpu"):
        trace(model, device="tpu")
    with pytest.raises(TraceError, match="a dtype such as"):
        trace(model, autocast="bf16")
    with pytest.raises(TraceError, match="has no shape yet"):
        trace(nn.LazyLinear(8))
    with pytest.raises(TraceError, match=r"trace_step\(model.module"):
        trace(nn.DataParallel(model))
    with pytest.raises(TraceError, match="the loss is one number"):
        trace(model, loss=lambda output, target: output - target)
    with pytest.raises(TraceError, match="no gradient reaches the loss"):
        trace(copy.deepcopy(model).requires_grad_(False))


# --- the value -----------------------------------------------------------------------------------------------------------------


class Caching(nn.Module):
    """Keeps a tensor beside autograd's graph, as a model with a cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.cache = h * 2
        return self.second(h)


def test_a_trace_with_a_tensor_that_the_model_holds_round_trips_through_json() -> None:
    batch = torch.randn(256, 64), torch.randn(256, 64)
    result = trace_step(Caching(), batch, loss=nn.functional.mse_loss, optimizer="sgd")
    assert [slot.name for slot in result.slots if slot.storage < -1] == [":mul.held"]
    assert Trace.from_json(result.to_json()) == result


def test_a_trace_round_trips_through_json(tmp_path: Path) -> None:
    result = traced("unet", 2, device="cuda", autocast=torch.bfloat16, optimizer="adamw")
    result.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == result
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(TraceError, match=r"trace.save"):
        Trace.load(tmp_path / "other.json")


def test_a_trace_prints_its_largest_slots() -> None:
    text = repr(traced("vit"))
    assert text.startswith("Trace of ViT on cpu, float32, batch 0: (4, 3, 32, 32) float32")
    assert text.count("\n") == 12 and "layers.1.mlp.1:input" in text
    with pytest.raises(TraceError, match="no slot 'nowhere'"):
        traced("mlp").slot("nowhere")


class Translator(nn.Module):
    """nn.Transformer, which reads the values of its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.inner(source, target, tgt_mask=mask)


def test_a_transformer_that_reads_its_mask() -> None:
    result = trace_step(
        Translator(), (torch.ones(2, 8, 32), torch.ones(2, 8, 32), torch.ones(2, 8, 32)), loss=nn.functional.mse_loss, device="cuda"
    )
    assert any("assumed to be causal" in note for note in result.notes)
    assert any("self_attn" in slot.name for slot in result.activations)
    from torch.nn.modules import transformer

    assert transformer._detect_is_causal_mask.__module__ == transformer.__name__, "torch's own is back"


@pytest.mark.parametrize(
    ("loss", "said"), [(nn.MSELoss, r"the class MSELoss: pass an instance, MSELoss\(\)"), ("mse", "not 'mse'")]
)
def test_a_loss_that_is_no_function_is_refused(loss: object, said: str) -> None:
    model, batch = nn.Linear(4, 4), (torch.empty(2, 4), torch.empty(2, 4))
    with pytest.raises(TraceError, match=said):
        trace_step(model, batch, loss=loss, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=said):
        verify(model, batch, Plan.preset("activations8"), loss=loss)  # type: ignore[arg-type]
