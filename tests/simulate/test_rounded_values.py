"""Simulate mode rounds what the papers round, where they round it: compared with steps computed by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from paredown import Plan, apply, round_trip, trace_step
from paredown.autograd.operations import Use
from paredown.models import MODELS, OF_TEXT, random_batch
from paredown.models.transformer import token_loss
from paredown.simulate.outline import outline
from paredown.simulate.rounded_values import Simulate
from tests.session.nets import pictures
from tests.simulate.rounded_nets import (
    BACKWARD,
    FORWARD,
    HIGH,
    PAPER,
    Float,
    Forked,
    Roundings,
    forked_step,
    paper_plan,
    same,
    sent_back,
    step,
)


def test_the_oracle_rounds_as_the_codec_does() -> None:
    torch.manual_seed(0)
    x = torch.cat(
        [torch.randn(4000) * torch.exp2(torch.randint(-20, 20, (4000,)).float()), torch.tensor([31.0, 30.99, -31.0, 0.0])]
    )
    for float_ in (FORWARD, BACKWARD, HIGH):
        ours = round_trip(x, float_.text, rounding="nearest_away", overflow=float_.past)
        assert torch.equal(ours, float_(x))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
@pytest.mark.parametrize("sums", ["exact", "rounded"])
def test_a_step_is_the_one_written_by_hand(sums: str, scale: float) -> None:
    net, x, sent = Forked(), 4 * pictures(2, side=8), sent_back(scale)
    out, gradients = forked_step(net, x, sent, PAPER, sums=sums == "rounded")
    apply(paper_plan(), net, mode=Simulate(sums=sums))
    ours, found = step(net, x, sent)
    assert torch.equal(ours, out)
    torch.testing.assert_close(found, gradients, rtol=0, atol=0, equal_nan=True)
    assert scale < 1e4 or any(not gradient.isfinite().all() for gradient in gradients.values()), "errors overflow to infinity"


@pytest.mark.parametrize("role", ["activation", "error", "weight", "gradient"])
def test_each_role_alone(role: str) -> None:
    chosen: dict[str, Any] = {"activation": FORWARD, "error": BACKWARD, "weight": FORWARD, "gradient": HIGH}
    net, x, sent = Forked(), 4 * pictures(2, side=8), sent_back()
    by = Roundings(**{name: chosen[name] if name == role else same for name in chosen})
    out, gradients = forked_step(net, x, sent, by)
    apply(chosen[role].rule(Plan.uniform(), role), net, mode="simulate")
    ours, found = step(net, x, sent)
    assert torch.equal(ours, out)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet50"])
def test_an_exact_plan_changes_no_bit(name: str) -> None:
    torch.manual_seed(0)
    model, (x, target) = MODELS[name](), random_batch(name, 2)
    loss = token_loss if name in OF_TEXT else cross_entropy
    plain = copy.deepcopy(model)
    session = apply(Plan.uniform(), model, mode="simulate")
    with session.following():
        ours = loss(model(x), target)
    theirs = loss(plain(x), target)
    ours.backward(), theirs.backward()
    assert torch.equal(ours, theirs)
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad), key
    assert not session.changes


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet50", "lstm")])
def test_slots_have_the_names_of_traces(name: str) -> None:
    """A recurrent layer is one operation here, so what it saves inside has no slot."""
    model, batch = MODELS[name](), random_batch(name, 2)
    loss = token_loss if name in OF_TEXT else cross_entropy
    answered = {known for value in outline(model, batch, loss=loss).values for known in value.names}
    for slot in trace_step(model, batch, loss=loss, device="cpu").activations:
        if Use.VALUE in slot.uses:
            assert set(slot.names) <= answered, slot.names


def test_a_plan_may_name_a_value_by_who_saves_it() -> None:
    x, sent = pictures(2, side=8), sent_back()
    outputs: list[Tensor] = []
    for key in ("bn:input", "conv:output", "fc:input"):
        net = Forked()
        with apply(Plan.uniform().set(key, "e2m1fn"), net, mode="simulate"):
            outputs.append(step(net, x, sent)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_backward_uses_the_rounded_output_of_what_needs_its_own() -> None:
    coarse = Float("e4m0f", 0, -6, 8, "saturate")

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    x = torch.linspace(-2, 2, 9, requires_grad=True)
    net = Net()
    apply(coarse.rule(Plan.uniform(), "activation=:sigmoid.output"), net, mode="simulate")
    y = net(x)
    y.backward(torch.ones(9))
    rounded = coarse(torch.sigmoid(x))
    assert torch.equal(y, rounded)
    assert torch.equal(x.grad, rounded * (1 - rounded))


@pytest.mark.parametrize("is_in_place", [False, True])
def test_in_place_operations_make_values_too(is_in_place: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            if is_in_place:
                h *= 3.0
                h.relu_()
                return h
            return (h * 3.0).relu()

    net, plan = Net(), paper_plan()
    apply(plan, net, mode="simulate")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    out, found = step(net, x, torch.ones(4, 8))
    h = FORWARD(torch.nn.functional.linear(FORWARD(x), FORWARD(net.fc.weight), FORWARD(net.fc.bias)))
    assert torch.equal(out, FORWARD(FORWARD(h * 3.0).relu()))
    assert torch.equal(found["fc.bias"], HIGH((3.0 * (h > 0)).sum(0)))


def test_a_loss_outside_is_rounded_where_it_is_followed() -> None:
    torch.manual_seed(0)
    net, x, target = nn.Sequential(nn.Linear(6, 4)), 3 * torch.randn(30, 6), torch.randint(4, (30,))
    coarse = Float("e4m3f", 3, -6, 8, "saturate")
    session = apply(coarse.rule(Plan.uniform(), "activation"), net, mode="simulate")
    with session.following():
        loss = cross_entropy(net(x), target)
    log = coarse(torch.log_softmax(coarse(torch.nn.functional.linear(coarse(x), net[0].weight, net[0].bias)), 1))
    assert loss.item() == coarse(-log.gather(1, target[:, None]).mean()).item()
    with session.following():
        model_alone = net(x)
    assert torch.equal(model_alone, net(x)), "names and inputs are the model's own inside of what is followed"


def test_evaluation_rounds_too_and_remembers_nothing() -> None:
    net, x = Forked(), pictures(2, side=8)
    session = apply(FORWARD.rule(Plan.uniform(), "activation"), net, mode=Simulate(raised=Plan.uniform()))
    with torch.no_grad():
        net.eval()
        assert torch.equal(net(100 * x), FORWARD(net(100 * x)))
    net.train()(0.001 * x)
    session.promote()
    assert not session.promotions, "what overflowed in evaluation is not looked at"


def test_weights_are_rounded_copies_and_the_parameter_is_the_master() -> None:
    net = Forked()
    before = copy.deepcopy(net.state_dict())
    apply(FORWARD.rule(Plan.uniform(), "weight"), net, mode="simulate")
    step(net, pictures(2, side=8), sent_back())
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-20)
    optimizer.step()
    assert net.fc.weight.grad is not None
    assert torch.equal(net.fc.weight, before["fc.weight"] - 2.0**-20 * net.fc.weight.grad)


def test_stochastic_rounding_follows_seed_and_pass() -> None:
    def outputs(seed: int) -> list[Tensor]:
        net = Forked()
        apply(Plan.uniform(activation="e4m1f", rounding="stochastic", overflow="saturate"), net, seed=seed, mode="simulate")
        return [net(pictures(2, side=8)).detach() for _ in range(2)]

    first, again, other = outputs(1), outputs(1), outputs(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def test_another_count_of_passes_has_other_random_bits() -> None:
    plan = Plan.uniform(activation="e4m1f", rounding="stochastic", overflow="saturate")
    net, x = Forked(), pictures(2, side=8)
    session = apply(plan, net, mode="simulate")
    first = net(x).detach()
    session.set_plan(plan, forwards=1_000_000)
    assert not torch.equal(net(x), first) and session.forwards == 1_000_001
    session.set_plan(plan, forwards=0)
    assert torch.equal(net(x), first)


def test_blocks_are_rounded_by_the_codec() -> None:
    net, x = Forked(), pictures(2, side=8)
    plain = net(x).detach()
    apply(Plan.uniform().set("fc:output", "int4/4@fp32", rounding="stochastic"), net, mode="simulate")
    assert torch.equal(net(x), round_trip(plain, "int4/4@fp32", rounding="stochastic", seed=_seed("fc:output")))


def _seed(name: str) -> Any:
    from zlib import crc32

    from paredown import Seed

    return Seed(0, crc32(f"activation={name}".encode()), 1)


class Checkpointed(Forked):
    """The same; `is_checkpointed` runs norm and ReLU again in backward."""

    is_checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(self.bn, self.relu)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        part = checkpoint(self.second, x, use_reentrant=False) if self.is_checkpointed else self.second(x)
        return self.fc((part + x).flatten(1))


@pytest.mark.parametrize("rounding", ["nearest_away", "stochastic"])
def test_checkpointed_parts_are_rounded_alike_in_their_second_call(rounding: str) -> None:
    plan = Plan.uniform(activation="e4m3b11f", weight="e4m3b11f", error="e5m2f", rounding=rounding, overflow="saturate")
    results: list[dict[str, Tensor]] = []
    for is_checkpointed in (False, True):
        net = Checkpointed()
        net.is_checkpointed = is_checkpointed
        apply(plan, net, seed=3, mode="simulate")
        results.append(step(net, 4 * pictures(2, side=8), sent_back())[1])
        assert not torch.overrides._get_current_function_mode_stack()
    assert all(torch.equal(results[1][name], gradient) for name, gradient in results[0].items())


def test_sessions_do_not_take_each_others_values() -> None:
    """The output of one model is an input of the other, and tensors of the caller have no mark."""
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)
    coarse = Float("e4m1f", 1, -6, 8, "saturate")
    apply(FORWARD.rule(Plan.uniform(), "activation"), first, mode="simulate")
    other = apply(coarse.rule(Plan.uniform(), "activation"), second, mode="simulate")
    h = first(x)
    assert not vars(x)
    assert torch.equal(second(h), coarse(torch.nn.functional.linear(coarse(h), second.weight, second.bias)))
    with other.following():
        summed = h + h
    assert torch.equal(summed, coarse(h.detach() + h.detach()))


def test_a_model_of_one_layer_has_the_names_of_its_trace() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(64, 64)
    found = outline(layer, (x,))
    assert [value.names for value in found.values] == [("input1", ":input"), (":output",)]
    saved = trace_step(layer, (x, x), loss=nn.functional.mse_loss, device="cpu").activations
    assert all(slot.name.startswith("loss:") for slot in saved), "the caller holds its input"


def test_a_session_that_begins_with_evaluation_knows_the_names_of_training() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).eval()
    session = apply(Plan.uniform().set("2:input", "e2m1fn"), net, mode="simulate")
    with torch.no_grad():
        net(torch.randn(4, 8))
    assert not session.changes and not net.training
    seen: list[Tensor] = []
    net[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    net.train()(torch.randn(4, 8))
    assert torch.equal(seen[0], round_trip(seen[0], "e2m1fn", overflow="saturate"))


@pytest.mark.parametrize("key", ["activation", ":getitem.output", "fc:input"])
def test_a_part_may_have_a_format_of_its_own(key: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            return self.fc(h[:, :4]) + h[:, 4:]

    coarse = Float("e4m1f", 1, -6, 8, "saturate")
    net, x, q = Net(), torch.randn(3, 8, generator=torch.Generator().manual_seed(2)), Float("e4m3b11f", 3, -10, 4, "saturate")
    plan = q.rule(Plan.uniform(), "activation")
    apply(plan if key == "activation" else coarse.rule(plan, key), net, mode="simulate")
    h = q(q(x) * 1.0)
    whole = {"activation": h, "fc:input": coarse(h), ":getitem.output": h}[key]  # what saves a part names the whole
    first = coarse(h[:, :4]) if key == ":getitem.output" else whole[:, :4]
    assert torch.equal(net(x), q(q(nn.functional.linear(first, net.fc.weight, net.fc.bias)) + whole[:, 4:]))


def test_looking_at_a_tensor_changes_nothing() -> None:
    class Net(Forked):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            assert "tensor" in repr(x) and f"{x.sum():.3f}"
            return self.fc((self.relu(self.bn(x)) + x).flatten(1))

    out, gradients = forked_step(Net(), pictures(2, side=8), sent_back(), PAPER)
    net = Net()
    apply(paper_plan(), net, mode="simulate")
    ours, found = step(net, pictures(2, side=8), sent_back())
    assert torch.equal(ours, out) and all(torch.equal(found[name], g) for name, g in gradients.items())


def test_a_model_that_is_compiled_later_says_so() -> None:
    net = Forked()
    session = apply(paper_plan(), net, mode="simulate")
    torch.compile(net, backend="eager")(pictures(2, side=8))
    assert "torch.compile runs the model" in session.changes[-1].reason
