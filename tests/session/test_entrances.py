"""Forward passes that enter a model through its modules: what they save is packed, and a session that packs nothing says so."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paredown import Plan, apply, optim
from paredown.autograd import pass_chains
from paredown.errors import ApplyError
from paredown.session.eager.forward_passes import ForwardStorage
from paredown.session.eager.stored_tensors import StorageRef
from tests.session.nets import INT8, activations, assert_same

Step = Callable[["Coder", Tensor], Tensor]


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


STEPS: dict[str, Step] = {
    "encode, then decode": lambda net, x: net.decoder(net.encoder(x)),
    "a module twice": lambda net, x: net.encoder(x).square() + net.encoder(2 * x),
    "forward()": lambda net, x: net.forward(x),
}


def coder() -> Coder:
    torch.manual_seed(0)
    return Coder()


def batch(number: int) -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(number))


def wide(number: int) -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(number))


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", STEPS)
def test_what_modules_save_is_packed_when_the_step_calls_them(name: str) -> None:
    net, plain, step = coder(), coder(), STEPS[name]
    with apply(activations(INT8), net) as session:
        for number in range(8):  # from about the fourth on, passes repeat earlier ones
            loss = step(net, batch(number)).square().mean()
            assert session.stored_bytes > 2 * 256 * 64, "of each entrance two tensors of 256 x 64 values or more, a byte each"
            loss.backward()
            step(plain, batch(number)).square().mean().backward()
            for mine, theirs in zip(gradients(net), gradients(plain), strict=True):
                assert (mine - theirs).norm() <= 0.05 * theirs.norm()
        assert session.stored_bytes == 0 and session.forwards == 16
        assert "encoder.2:input" in session.explain().of("encoder.2:input").slot


def test_passes_through_the_model_have_the_bits_they_had_between_passes_through_modules() -> None:
    """Slots have the same names, so that the same step of a fresh session with the same number of passes draws the same bits."""
    plan, found = activations("int4/64@bf16", "stochastic"), list[list[Tensor]]()
    for mixes in (True, False):
        net = coder()
        with apply(plan, net) as session:
            for number in range(8):
                if mixes:
                    net.encoder(batch(number)).sum().backward()
                else:
                    session._activations.forwards += 1
                gradients(net)
                net(batch(number)).square().mean().backward()
                if number in (0, 7):
                    found.append(gradients(net))
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_module_that_raises_ends_its_pass() -> None:
    net = coder()
    with apply(activations(INT8), net) as session:
        with pytest.raises(RuntimeError, match="shapes"):
            net.encoder(torch.randn(4, 31))
        net.decoder(net.encoder(batch(0))).sum().backward()
        assert session.forwards == 3 and not session._watch._passes
    assert not net.encoder._forward_hooks_always_called


@pytest.mark.parametrize("through_model", [True, False])
@pytest.mark.parametrize("num_before", [0, 4])  # the pass is read, or repeats earlier ones
def test_an_interrupted_step_is_over_in_the_next_one(num_before: int, through_model: bool) -> None:
    """torch calls no hook after a KeyboardInterrupt, as in a notebook whose cell is stopped and run again."""
    net = coder()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def forward() -> Tensor:
        return net(batch(0)) if through_model else net.decoder(net.encoder(batch(0)))

    with apply(activations("int4/64@bf16"), net) as session:
        for _ in range(num_before):
            forward().square().mean().backward()
        handle = net.encoder[3].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            forward()
        handle.remove()
        bytes_of_steps, before = list[int](), session.forwards
        for _ in range(4):
            loss = forward().square().mean()
            bytes_of_steps.append(session.stored_bytes)
            loss.backward()
            assert session.stored_bytes == 0 and not session._watch._passes
        assert len(set(bytes_of_steps)) == 1 and session.forwards - before == (4 if through_model else 8)
    assert not net.encoder._forward_hooks_always_called


def test_calls_without_gradients_are_no_passes() -> None:
    net = coder()
    with apply(activations(INT8), net) as session, torch.no_grad():
        net.decoder(net.encoder(batch(0)))
        assert session.forwards == 0


# --- operations between the calls of modules ---------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Single layers, which `way` calls: from the forward of the model, or from outside of it."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mean, self.spread, self.second = (nn.Linear(64, width) for width in (64, 64, 64, 32))
        self.squashed, self.rectified = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def autoencoder(net: Any, x: Tensor) -> Tensor:
    hidden = F.relu(net.first(x))
    mean, spread = net.mean(hidden), net.spread(hidden)
    return net.second(F.silu(mean + x * torch.exp(spread / 2)))  # x as the noise, which is the caller's


def skips(net: Any, x: Tensor) -> Tensor:
    hidden = net.first(x)
    squashed = net.squashed(hidden)
    return net.second(net.rectified(squashed * hidden) + torch.cat([squashed, hidden], 1)[:, :64])


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "variational autoencoder": autoencoder,
    "gelu": lambda net, x: net.second(F.gelu(net.mean(F.gelu(net.first(x))))),
    "modules that end with what saves its output": lambda net, x: net.second(net.rectified(net.squashed(net.first(x)))),
    "skips": skips,
    "in place": lambda net, x: net.second(F.relu_(net.mean(F.relu_(net.first(x))))),
    "views": lambda net, x: net.second(net.mean(net.first(x).view(128, 2, 64).transpose(0, 1)).flatten(0, 1)),
    "a layer again and again": lambda net, x: net.second(torch.sin(net.mean(torch.sin(net.mean(torch.sin(net.first(x))))))),
    "sums of outputs": lambda net, x: net.second(net.squashed(x) + net.rectified(x)),
}


@pytest.mark.parametrize("format", ["fp32", INT8, "int4/64@bf16"])
@pytest.mark.parametrize("name", WAYS)
def test_calls_from_outside_save_and_compute_what_a_forward_does(name: str, format: str | None) -> None:
    """Formats round to nearest here, so that gradients are the same to the bit; outputs of the model are the caller's in both."""
    way, plan = WAYS[name], Plan().set("activation", format, rounding="nearest_even")
    inside, outside = Layers(way), Layers(lambda net, x: x)
    with apply(plan, inside) as whole, apply(plan, outside) as parts:
        for number in range(7):  # from about the fourth on, passes repeat earlier ones
            found = list[list[Tensor]]()
            for net, step in ((outside, way), (inside, lambda net, x: net(x))):
                torch.manual_seed(number)
                loss = step(net, wide(number)).square().mean()
                if net is outside:
                    stored = parts.stored_bytes
                else:
                    assert whole.stored_bytes == stored
                loss.backward()
                found.append(gradients(net))
            assert_same(*found)
        assert whole.stored_bytes == parts.stored_bytes == 0
        assert not [row for row in parts.changes if "not freed" in row.reason]


@pytest.mark.parametrize("name", WAYS)
def test_what_is_packed_between_calls_is_freed(name: str) -> None:
    """The storages of all tensors between the calls that the plan packs are gone before backward, the others are in `changes`."""
    made, net = list[StorageRef](), Layers(lambda net, x: x)
    for part in (net.first, net.mean, net.spread, net.squashed, net.rectified):
        part.register_forward_hook(lambda module, args, output: made.append(StorageRef(output.untyped_storage())))
    with apply(activations(INT8), net):
        for number in range(6):
            made.clear()
            loss = WAYS[name](net, wide(number)).square().mean()
            assert made and all(ref.expired() for ref in made)
            loss.backward()


def test_an_argument_that_a_variable_holds_until_backward_is_told() -> None:
    net = Layers(lambda net, x: x)

    def loss(number: int) -> Tensor:
        return net.second(F.relu(net.first(wide(number)))).sum()

    with apply(activations(INT8), net) as session:
        for number in range(2):
            hidden = F.relu(net.first(wide(number)))
            net.second(hidden).sum().backward()
        rows = {row.slot: row.reason for row in session.changes}
        assert "a variable refers to it until backward has ended" in rows[":relu.output"], rows
        del hidden
        for number in range(2):
            loss(number).backward()
        assert not [row for row in session.changes if "a variable refers" in row.reason]


def own_hooks(tensor: Tensor) -> list[str]:
    """The names of all nodes behind `tensor` of which a saved tensor is packed."""
    found, stack, seen = list[str](), [tensor.grad_fn], set[Any]()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            raws = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
            if any(isinstance(getattr(raw, "unpack_hook", None), types.MethodType | types.FunctionType) for raw in raws):
                found.append(node.name())
            stack.extend(after for after, _ in node.next_functions)
    return found


BETWEEN: dict[str, Callable[[], tuple[nn.Module, Plan | None]]] = {
    "trained": lambda: (network(), None),
    "frozen": lambda: (network().requires_grad_(False), None),
    "with packed weights": lambda: (network().requires_grad_(False), Plan.uniform(frozen=INT8)),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


@pytest.mark.parametrize("name", BETWEEN)
def test_no_operation_of_another_network_is_packed(name: str) -> None:
    """It runs between two modules of the model, or beside what is between them."""
    net, (other, plan) = Layers(lambda net, x: x), BETWEEN[name]()
    if plan is not None:
        apply(plan, other)
    with apply(activations(INT8), net) as session:
        for _ in range(3):
            assert "TanhBackward0" not in own_hooks(net.second(torch.sin(other(net.first(wide(0))))))
            names = {name for name in session._activations.names if name.startswith(":")}
            assert not names, f"operations of the model: {names}"
            beside = net.second(torch.sin(net.first(wide(0)) + other(wide(0))))
            assert "SinBackward0" in own_hooks(beside) and "TanhBackward0" not in own_hooks(beside)
            session._activations.names.clear()


def test_nothing_grows_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of nodes are bounded, and nothing of a step outlives it."""
    monkeypatch.setattr(pass_chains, "MAX_KNOWN", 32)
    net, gone = Layers(lambda net, x: x), list[weakref.ref[Any]]()
    with apply(activations(INT8), net) as session:
        for number in range(4):
            state = net.first(wide(number))
            for _ in range(12):
                state = torch.sin(net.squashed(state))
            gone += [weakref.ref(state), weakref.ref(state.untyped_storage())]
            state.sum().backward()
            del state
            gradients(net)
        gc.collect()
        assert not [ref for ref in gone if ref() is not None]
        chain, outputs = session._watch._chain(), session._activations._local.outputs
        assert len(chain._known) == 32
        outputs.begin(ForwardStorage(), [], ())
        assert not (outputs._forms or outputs._unmodified or outputs._arguments)


OPTIMIZERS: dict[str, tuple[Plan, Callable[..., torch.optim.Optimizer]]] = {
    "torch.optim": (activations(INT8), torch.optim.SGD),
    "unmodified state": (activations(INT8), optim.SGD),
    "packed gradients and moments": (activations(INT8).set("gradient", INT8).set("moment1", INT8), optim.AdamW),
    "updates in backward": (activations(INT8), lambda p, lr: optim.SGD(p, lr=lr, release=True)),
    "microbatches": (activations(INT8), lambda p, lr: optim.SGD(p, lr=lr, microbatches=2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_calls_no_module_is_told_in_changes_the_summary_and_one_warning(name: str) -> None:
    net, (plan, make) = nn.Linear(64, 64), OPTIMIZERS[name]
    session = apply(plan, net)
    optimizer = make(net.parameters(), lr=0.1)
    for number in range(2):
        net.forward(torch.randn(256, 64)).square().mean().backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        assert [warning.filename for warning in found] == [__file__] * (number == 0), "once, at the line of the step"
    rows = [(row.slot, row.given) for row in session.changes if row.slot == "the model"]
    assert rows == [("the model", "unmodified")]
    is_packed = "gradient" in str(plan)
    assert str(session.summary()).startswith("Nothing is stored in a format of this plan") != is_packed


def test_a_plan_that_matches_nothing_says_so() -> None:
    with pytest.warns(UserWarning, match=r"stores nothing of this model: frozen=\*: no parameter is frozen") as warned:
        session = apply(Plan.preset("frozen4"), coder())
    assert [one.filename for one in warned] == [__file__], "it points at the call of apply"
    (row,) = session.changes
    assert (row.slot, row.given) == ("frozen=*", "nothing") and "no parameter is frozen" in row.reason
    assert str(session.summary()).startswith("Nothing is stored in a format of this plan")
    session.close()
    net = coder()
    net.encoder.requires_grad_(False)
    session = apply(Plan.preset("frozen4"), net)
    assert all(row.slot != "frozen=*" for row in session.changes)


def test_a_session_with_nothing_large_to_pack_says_so() -> None:
    net = nn.Linear(8, 8)
    with apply(activations(INT8), net) as session:
        net(torch.randn(4, 8)).sum().backward()
        (row,) = session.changes
        assert row.slot == "the model" and "no forward pass saved a tensor for backward that is large enough" in row.reason
        assert "Nothing is stored" in str(session.summary()) and "as requested: 1 row" in str(session.summary())


def test_rules_that_no_pass_has_matched_so_far_are_named() -> None:
    net = coder()
    session = apply(Plan().set("activation=encoder.*", INT8).set("activation=decoder.*", INT8), net)
    net.encoder(batch(0)).sum().backward()
    assert [row.slot for row in session.changes if row.reason.startswith("no forward pass so far")] == ["activation=decoder.*"]
    net.decoder(torch.randn(256, 16)).sum().backward()
    assert not [row for row in session.changes if row.reason.startswith("no forward pass so far")]


def test_scripted_models_are_refused_and_scripted_parts_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    with pytest.raises(ApplyError, match="Apply the plan to the model before torch"):
        apply(activations(INT8), scripted)
    session = apply(activations(INT8), nn.Sequential(nn.Linear(64, 64), scripted))
    assert [row.slot for row in session.changes if "torch.jit.script" in row.reason] == ["1"]
