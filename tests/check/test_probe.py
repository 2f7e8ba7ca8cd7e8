"""`probe` against brute force: a real session for each slot, with that slot alone in the plan, and the gradients it gives."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import paredown as pare
from paredown.check.probe import FORMATS
from paredown.errors import ApplyError, TraceError
from paredown.formats.format import Format
from paredown.models import MODELS, OF_TEXT, random_batch
from paredown.models.resnet import Basic, ResNet
from paredown.models.transformer import token_loss
from tests.session.nets import INT4, INT8, Net, rows

INT2 = FORMATS[-1]
NETS = {**MODELS, "resnet10": partial(ResNet, Basic, (1, 1, 1, 1), num_classes=10, width=8, small_input=True)}
TRAINED = 12  # steps before the probe: gradients at a random start are not those of training


def trained(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """A small reference network after a few steps on one batch, both drawn from `seed`."""
    torch.manual_seed(seed)
    model, batch, loss = NETS[name](), random_batch(name, 8, seed=seed), token_loss if name in OF_TEXT else cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(TRAINED):
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, batch, loss


def step_gradients(model: nn.Module, batch: Any, loss: Callable[..., Tensor], plan: pare.Plan) -> list[Tensor]:
    """Those of a real step under `plan`."""
    other = copy.deepcopy(model)
    with pare.apply(plan, other, seed=11):
        loss(other(batch[0]), batch[1]).backward()
    return [p.grad for p in other.parameters() if p.grad is not None]


def difference(exact: Sequence[Tensor], rounded: Sequence[Tensor]) -> float:
    """The sum over parameters of |difference|^2 / |gradient|^2, from the definition."""
    return sum(float((a - b).square().sum() / a.square().sum()) for a, b in zip(exact, rounded, strict=True) if a.any())


def gradient_error(model: nn.Module, batch: Any, loss: Callable[..., Tensor], plan: pare.Plan) -> float:
    """Of a real step under `plan`, against one without."""
    return difference(*(step_gradients(model, batch, loss, rules) for rules in (pare.Plan(), plan)))


def plan_of(formats: Mapping[str, str]) -> pare.Plan:
    plan = pare.Plan()
    for name, format in formats.items():
        plan = plan.set(f"activation={name}", format)
    return plan


def spearman(first: list[float], second: list[float]) -> float:
    """The correlation of ranks."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@dataclass(frozen=True)
class Draw:
    """A probe beside brute force, of a network, a batch and a start that one seed drew."""

    correlation: float  # of the ranks of the slots' errors
    total: float  # sum of the probe's errors over that of brute force's
    lost: float  # half of the bytes is rounded where the probe finds it cheapest: 0 is brute force's own choice, 1 its opposite


def cheapest(errors: Mapping[str, float], nbytes: Mapping[str, int]) -> pare.Plan:
    """The half of the bytes that costs least."""
    taken, spent = dict[str, str](), 0
    for slot in sorted(errors, key=lambda slot: errors[slot] / nbytes[slot]):
        spent += nbytes[slot]
        if spent <= sum(nbytes.values()) / 2:
            taken[slot] = INT4
    return plan_of(taken)


def drawn(name: str, seed: int) -> Draw:
    """Probe once, then round each slot alone in a session of its own."""
    model, batch, loss = trained(name, seed)
    trace = pare.trace_step(model, batch, loss=loss, device="cpu")
    probed = {slot: row[INT4] for slot, row in pare.probe(model, batch, trace, loss=loss).errors.items()}
    assert len(probed) >= 15
    exact = step_gradients(model, batch, loss, pare.Plan())

    def error_of(plan: pare.Plan) -> float:
        return difference(exact, step_gradients(model, batch, loss, plan))

    brute = {slot: error_of(plan_of({slot: INT4})) for slot in probed}
    nbytes = {slot: trace.slot(slot).nbytes for slot in probed}
    opposite = {slot: -error for slot, error in brute.items()}
    ours, best, worst = (error_of(cheapest(errors, nbytes)) for errors in (probed, brute, opposite))
    correlation = spearman(list(probed.values()), list(brute.values()))
    return Draw(correlation, sum(probed.values()) / sum(brute.values()), (ours - best) / (worst - best))


# network: draws, and the least mean correlation of ranks
LEAST = {"resnet10": (5, 0.6), "gpt": (2, 0.9)}


@pytest.mark.parametrize("name", [pytest.param("resnet10", marks=pytest.mark.full), "gpt"])
def test_ranks_slots_as_brute_force_does(name: str) -> None:
    """Means over a few seeds, so that no single network decides, whose ranks other arithmetic may change.

    Mean and standard deviation of one draw, measured with 24 (resnet10) and 16 (gpt) other seeds, each with AVX-512 and AVX2:

        resnet10    correlation 0.81, 0.09    total 0.97, 0.08    lost 0.025, 0.031
        gpt         correlation 0.98, 0.01    total 1.01, 0.11    lost 0.002, 0.003

    Each limit is 5 standard errors of the mean of these draws away or more: below one false alarm in a million on a new machine, if
    means are normal. Errors that have nothing to do with brute force's have a mean correlation of 0, with a standard deviation of 0.10
    (five draws of 20 slots) or 0.17 (two of 18).
    """
    num, least = LEAST[name]
    draws = [drawn(name, seed) for seed in range(num)]
    assert fmean(draw.correlation for draw in draws) >= least
    assert 0.6 < fmean(draw.total for draw in draws) < 1.6, "the size too, not the order alone"
    assert fmean(draw.lost for draw in draws) <= 0.12


def test_measures_linear_inputs_exactly() -> None:
    """What a linear layer has of its input reaches its own weight alone: the same bits as a session's, and so the same error."""
    net = Net(lambda m, x: m.b(m.a(x).sin().add(1)))
    batch = (rows(), rows(seed=2))
    trace = pare.trace_step(net, batch, loss=mse_loss, device="cpu")
    found = pare.probe(net, batch, trace, loss=mse_loss, formats=[INT8])
    exact = gradient_error(net, batch, mse_loss, plan_of({"b:input": INT8}))  # nearest: no seed in it
    assert found.errors["b:input"][INT8] == pytest.approx(exact, rel=1e-4)


def test_runs_at_most_the_given_number_of_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = trained("gpt")
    trace = pare.trace_step(model, batch, loss=loss, device="cpu")
    taken, grad = [0], torch.autograd.grad

    def counted(*args: Any, **keywords: Any) -> Any:
        taken[0] += 1
        return grad(*args, **keywords)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    for backwards in (2, 5, 16):
        taken[0] = 0
        found = pare.probe(model, batch, trace, loss=loss, backwards=backwards)
        called = len(FORMATS) if backwards > len(FORMATS) else 1
        assert taken[0] + called <= backwards
        assert all(set(row) == {str(Format.parse(text)) for text in FORMATS} for row in found.errors.values())


def test_leaves_the_model_as_it_was() -> None:
    model, batch, loss = trained("resnet18")
    model.train()
    model.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
    loss(model(batch[0]), batch[1]).backward()
    trace = pare.trace_step(model, batch, loss=loss, device="cpu")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    pare.probe(model, batch, trace, loss=loss, backwards=3)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(grads, [p.grad for p in model.parameters() if p.grad is not None], strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(m.training for m in model.modules())


def test_nothing_of_a_probe_is_in_the_way_of_packing_weights() -> None:
    model, loss = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)), mse_loss
    batch = rows(64, 128), rows(64, 128)
    trace = pare.trace_step(model, batch, loss=loss, device="cpu")
    gc.disable()  # what has to be collected first is in the way
    try:
        pare.probe(model, batch, trace, loss=loss)
        with pare.apply(pare.Plan.uniform(weight=INT8), model) as session:
            assert session.weight_bytes == 2 * Format.parse(INT8).nbytes((128, 128))
    finally:
        gc.enable()


def test_probes_a_batch_of_another_size() -> None:
    """Names are stable, and small tensors are probed too: a micro-batch tells of the whole one.

    Over 16 seeds the correlation has a mean of 0.88 and a standard deviation of 0.021: the limit is 6 of them away.
    """
    model, batch, loss = trained("gpt")
    trace = pare.trace_step(model, batch, loss=loss, device="cpu")
    small = pare.probe(model, (batch[0][:1], batch[1][:1]), trace, loss=loss, backwards=4)
    whole = pare.probe(model, batch, trace, loss=loss, backwards=4)
    assert set(small.errors) == set(whole.errors)
    assert spearman([r[INT4] for r in small.errors.values()], [whole.errors[n][INT4] for n in small.errors]) > 0.75


def test_a_pinned_slot_goes_no_lower_than_its_pin() -> None:
    model, batch, loss = trained("gpt")
    trace = pare.trace_step(model, batch, loss=loss, device="cpu")
    found = pare.probe(model, batch, trace, loss=loss, backwards=4)
    pinned = next(slot.name for slot in trace.activations if slot.pin is not None and slot.name in found.errors)
    assert found.errors[pinned][INT2] == pytest.approx(found.errors[pinned][INT8])
    free = next(name for name in found.errors if name.endswith("mlp.0:input"))
    assert found.errors[free][INT2] > 100 * found.errors[free][INT8]


def test_follows_autocast_of_the_trace() -> None:
    net = Net(lambda m, x: m.b(m.a(x).sin()))
    batch = (rows(), rows(seed=2))
    trace = pare.trace_step(net, batch, loss=lambda y, t: mse_loss(y.float(), t), device="cpu", autocast=torch.bfloat16)
    dtypes: list[torch.dtype] = []
    handle = net.b.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    found = pare.probe(net, batch, trace, loss=lambda y, t: mse_loss(y.float(), t), formats=[INT8], backwards=2)
    handle.remove()
    assert dtypes == [torch.bfloat16]
    assert found.errors["b:input"][INT8] > 0


def test_custom_functions_run_with_rounded_slots() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Tensor:
            return 2 * ctx.saved_tensors[0] * gradients[0]

    net = Net(lambda m, x: m.b(Square.apply(m.a(x))))
    batch = (rows(), rows(seed=2))
    trace = pare.trace_step(net, batch, loss=mse_loss, device="cpu")
    found = pare.probe(net, batch, trace, loss=mse_loss, formats=[INT8], backwards=6)
    slot = next(name for name in found.errors if "Square" in name)
    assert found.errors[slot][INT8] == pytest.approx(gradient_error(net, batch, mse_loss, plan_of({slot: INT8})), rel=1e-3)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"backwards": 1}, "2 or more"),
    ({"formats": []}, "a list of formats"),
    ({"formats": "int4/64@bf16"}, "a list of formats"),
]


@pytest.mark.parametrize(("keywords", "says"), BAD)
def test_says_what_is_wrong(keywords: dict[str, Any], says: str) -> None:
    net, batch = Net(lambda m, x: m.b(m.a(x))), (rows(), rows())
    trace = pare.trace_step(net, batch, loss=mse_loss, device="cpu")
    with pytest.raises(ApplyError, match=says):
        pare.probe(net, batch, trace, loss=mse_loss, **keywords)


def test_a_target_without_a_loss_is_refused() -> None:
    net, batch = nn.Linear(64, 64), (rows(), rows())
    trace = pare.trace_step(net, batch, loss=mse_loss, device="cpu")
    with pytest.raises(
        TraceError, match=r"called with all 2 parts of the batch.*pass the loss that takes it: probe\(\.\.\., loss="
    ):
        pare.probe(net, batch, trace)


def test_says_that_the_trace_is_of_another_model() -> None:
    net, batch = Net(lambda m, x: m.b(m.a(x).sin())), (rows(), rows())
    other = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    trace = pare.trace_step(other, batch, loss=mse_loss, device="cpu")
    with pytest.raises(ApplyError, match=r"none of the .* activations of the trace of Sequential"):
        pare.probe(net, batch, trace, loss=mse_loss)
    with pytest.raises(ApplyError, match="a Trace, not Linear"):
        pare.probe(net, batch, nn.Linear(2, 2), loss=mse_loss)  # type: ignore[arg-type]


def test_says_that_nothing_was_saved() -> None:
    net, batch = Net(lambda m, x: m.b(m.a(x))), (rows(), rows())
    trace = pare.trace_step(net, batch, loss=mse_loss, device="cpu")
    with pare.apply(pare.Plan.uniform(activation=INT8), net), pytest.raises(ApplyError, match="has an open session"):
        pare.probe(net, batch, trace, loss=mse_loss)
    with pytest.raises(ApplyError, match="all parameters are frozen"):
        pare.probe(net.requires_grad_(False), batch, trace, loss=mse_loss)


def test_says_that_gradients_are_not_finite() -> None:
    net, batch = Net(lambda m, x: m.b(m.a(x).sin())), (rows(), rows() * float("inf"))
    trace = pare.trace_step(net, batch, loss=mse_loss, device="cpu")
    with pytest.raises(ApplyError, match="not finite without any rounding"):
        pare.probe(net, batch, trace, loss=mse_loss)
