"""Forward passes that enter a model through its modules: what they save is packed, and a session that packs nothing says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paredown import Plan, apply
from paredown.errors import ApplyError
from tests.session.nets import INT8, activations

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
    plan, found = activations("int4/64@bf16"), list[list[Tensor]]()
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


def test_calls_without_gradients_are_no_passes() -> None:
    net = coder()
    with apply(activations(INT8), net) as session, torch.no_grad():
        net.decoder(net.encoder(batch(0)))
        assert session.forwards == 0


def test_a_step_that_calls_no_module_is_told_in_changes_the_summary_and_one_warning() -> None:
    net = nn.Linear(64, 64)
    session = apply(activations(INT8), net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(2):
        net.forward(torch.randn(256, 64)).square().mean().backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(found) == (number == 0)
    assert [(row.slot, row.given) for row in session.changes] == [("the model", "unmodified")]
    assert str(session.summary()).startswith("Nothing is stored in a format of this plan")


def test_a_plan_that_matches_nothing_says_so() -> None:
    session = apply(Plan.preset("frozen4"), coder())
    (row,) = session.changes
    assert (row.slot, row.given) == ("frozen=*", "nothing") and "no parameter is frozen" in row.reason
    assert str(session.summary()).startswith("Nothing is stored in a format of this plan")
    session.close()
    net = coder()
    net.encoder.requires_grad_(False)
    session = apply(Plan.preset("frozen4"), net)
    assert all(row.slot != "frozen=*" for row in session.changes)


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
