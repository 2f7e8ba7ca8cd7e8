"""Updates that rounding loses: steps of torch.optim over packed weights, and adapters merged into a packed base. Each warns once."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paredown as pare
from paredown.session.session import Session

NF4, INT8, LPMM = "nf4/64@bf16", "int8/64@bf16", "int8/64@e8m0"
OFF = re.compile(r"off by ([\d.e+]+) %")


def network(*, is_frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 64)).requires_grad_(not is_frozen)


def backward(net: nn.Module) -> None:
    torch.manual_seed(1)
    net(torch.randn(8, 128)).square().mean().backward()


def relative(error: Tensor, update: Tensor) -> float:
    return float(error.norm() / update.norm())


def percentage(text: str) -> float:
    found = OFF.search(text)
    assert found is not None, text
    return float(found[1])


def rows_about(session: Session, slot: str) -> list[str]:
    return [change.reason for change in session.changes if change.slot == slot]


# --- steps of torch.optim -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("is_single", [True, False])
def test_torch_optim_over_packed_weights_warns_once(options: dict[str, bool], is_single: bool) -> None:
    net = network()
    net[2].requires_grad_(not is_single)  # one packed weight is encoded after the step, of two the first during it
    session = pare.apply(pare.Plan.uniform(weight=LPMM, frozen=LPMM), net)
    plain = copy.deepcopy(net)
    before = plain[0].weight.detach().clone()
    backward(net)
    backward(plain)
    torch.optim.AdamW(plain.parameters(), lr=1e-4, **options).step()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, **options)
    with pytest.warns(UserWarning, match="torch.optim.AdamW updates .* weights? that .* stored packed") as warned:
        optimizer.step()
    backward(net)
    optimizer.step()
    assert len(warned) == 1
    text = str(warned[0].message)
    assert f"stored in {LPMM}" in text and "Use paredown.optim.AdamW" in text and f"{1 if is_single else 2} weight" in text
    (row,) = rows_about(session, "updates of weights")
    assert "paredown.optim.AdamW" in row
    assert percentage(row) == percentage(text) > 90
    session.close()
    with pare.apply(pare.Plan.uniform(weight=LPMM), net), pytest.warns(UserWarning, match="stored packed"):
        backward(net)  # another session warns again
        optimizer.step()
    assert relative(plain[0].weight.detach() - before, before) < 0.01


def test_a_step_that_changes_nothing_is_not_judged() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with pare.apply(pare.Plan.uniform(weight=LPMM), net) as session:
        backward(net)
        optimizer.step()  # the first step of a warm-up
        assert not rows_about(session, "updates of weights")
        optimizer.param_groups[0]["lr"] = 1e-3
        backward(net)
        with pytest.warns(UserWarning, match=r"is off by [1-9]\S* %"):
            optimizer.step()


def subtract(p: Any) -> None:
    with torch.no_grad():
        p -= 1e-4 * p.grad


def subtract_data(p: Any) -> None:
    p.data -= 1e-4 * p.grad.data


@pytest.mark.parametrize("update", [subtract, subtract_data])
def test_a_loop_that_writes_updates_itself_warns_once(update: Callable[[Any], None]) -> None:
    net = network()
    with pare.apply(pare.Plan.uniform(weight=LPMM), net) as session:
        before = net[0].weight.detach().clone()
        with pytest.warns(
            UserWarning, match=r"0.weight is trained and stored in int8/64@e8m0, and an update was written"
        ) as warned:
            for _ in range(3):
                backward(net)
                for p in net.parameters():
                    update(p)
                    p.grad = None
            net(torch.randn(2, 128))
        assert len(warned) == 1 and torch.equal(net[0].weight, before), "every update was lost"
        (row,) = rows_about(session, "updates of weights")
        assert percentage(row) == percentage(str(warned[0].message)) == pytest.approx(100)


def test_the_percentage_is_that_of_the_values() -> None:
    net = network()
    with pare.apply(pare.Plan.uniform(weight=INT8).set("weight=2.weight", None), net):
        plain = copy.deepcopy(net)
        before = net[0].weight.detach().clone()
        for model in (net, plain):
            backward(model)
        torch.optim.SGD(plain.parameters(), lr=5).step()
        with pytest.warns(UserWarning, match="torch.optim.SGD updates 1 weight that is") as warned:
            torch.optim.SGD(net.parameters(), lr=5).step()
        wanted, found = plain[0].weight.detach(), net[0].weight.detach().clone()
    measured = relative(found - wanted, wanted - before)
    assert 0.01 < measured < 10 and percentage(str(warned[0].message)) == pytest.approx(100 * measured, rel=0.05)


def test_optimizers_of_paredown_and_steps_over_other_weights_do_not_warn() -> None:
    net = network()
    net[0].requires_grad_(False)
    with pare.apply(pare.Plan.uniform(frozen=NF4), net) as session:
        backward(net)
        torch.optim.AdamW(net.parameters(), lr=1e-3).step()  # the frozen weight has no gradient
        assert not rows_about(session, "updates of weights")
    for kind in (pare.optim.AdamW, pare.optim.SGD, pare.optim.Lion):
        net = network()
        with pare.apply(pare.Plan.uniform(weight=LPMM), net) as session:
            optimizer = kind(net.parameters(), lr=1e-4)
            for _ in range(2):
                backward(net)
                optimizer.step()
            assert not rows_about(session, "updates of weights")


# --- merges -------------------------------------------------------------------------------------------------------------------


def add_to_data(weight: Any, delta: Tensor, session: Session) -> None:
    weight.data += delta


def replace_data(weight: Any, delta: Tensor, session: Session) -> None:
    values = weight.data.clone()
    values += delta
    weight.data = values


def add_in_place(weight: Any, delta: Tensor, session: Session) -> None:
    weight.add_(delta)


def add_unpacked(weight: Any, delta: Tensor, session: Session) -> None:
    with session.unpacked():
        weight.data += delta


Merge = Callable[[Any, Tensor, Session], None]
MERGES = pytest.mark.parametrize("merge", [add_to_data, replace_data, add_in_place, add_unpacked])


@MERGES
@pytest.mark.parametrize("text", [NF4, INT8])
def test_an_update_of_a_packed_frozen_weight_warns_once(merge: Merge, text: str) -> None:
    net = network(is_frozen=True)
    with pare.apply(pare.Plan.uniform(frozen=text), net) as session:
        before = [net[i].weight.detach().clone() for i in (0, 2)]
        deltas = [1e-3 * torch.randn_like(w) for w in before]
        with pytest.warns(UserWarning, match="was written while packed") as warned:
            for index, delta in zip((0, 2), deltas, strict=True):
                merge(net[index].weight, delta, session)
            net(torch.randn(2, 128))
        assert len(warned) == 1
        text_of_warning = str(warned[0].message)
        assert f"stored in {text}" in text_of_warning and "session.close()" in text_of_warning
        for index, old, delta in zip((0, 2), before, deltas, strict=True):
            (row,) = rows_about(session, f"weight={index}.weight")
            measured = 100 * relative(net[index].weight.detach().clone() - (old + delta), delta)
            assert percentage(row) == pytest.approx(measured, rel=0.02) and measured > 20


@MERGES
def test_after_close_a_merge_is_exact(merge: Merge) -> None:
    net = network(is_frozen=True)
    session = pare.apply(pare.Plan.uniform(frozen=NF4), net)
    decoded = net[0].weight.detach().clone()
    session.close()
    assert type(net[0].weight) is nn.Parameter and torch.equal(net[0].weight, decoded)
    if merge is not add_unpacked:
        delta = 1e-3 * torch.randn_like(decoded)
        merge(net[0].weight, delta, session)
        assert torch.equal(net[0].weight, decoded + delta)


def load_all(net: nn.Sequential, session: Session) -> None:
    net.load_state_dict({name: 1.01 * values for name, values in net.state_dict().items()})


def load_a_part(net: nn.Sequential, session: Session) -> None:
    net[0].load_state_dict({name: 1.01 * values for name, values in net[0].state_dict().items()})


def load_unpacked(net: nn.Sequential, session: Session) -> None:
    with session.unpacked():
        load_all(net, session)


def initialize(net: nn.Sequential, session: Session) -> None:
    for p in net.parameters():
        nn.init.normal_(p, std=0.02)


@pytest.mark.parametrize("write", [load_all, load_a_part, load_unpacked, initialize])
def test_new_values_do_not_warn(write: Callable[[nn.Sequential, Session], None]) -> None:
    net = network(is_frozen=True)
    with warnings.catch_warnings(), pare.apply(pare.Plan.uniform(frozen=NF4), net) as session:
        warnings.simplefilter("error")
        write(net, session)
        net(torch.randn(2, 128))
        assert not rows_about(session, "weight=0.weight")
        with pytest.warns(UserWarning, match=r"0.weight is stored in nf4/64@bf16 and was written"):
            net[0].weight.data += 1e-3  # a later update does
            net(torch.randn(2, 128))


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        made = peft.get_peft_model(network(), peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
        with torch.no_grad():
            for name, p in made.named_parameters():
                if "lora_" in name:
                    p.mul_(0.2)
        return made

    x = torch.randn(4, 128)
    torch.manual_seed(3)
    model = adapted()
    session = pare.apply(pare.Plan.uniform(frozen=NF4), model)
    with torch.no_grad():
        expected = model(x)  # adapters beside the packed base
    closed = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"merge_and_unload\(\)"):
        merged = model.merge_and_unload()
        found = merged(x).detach()
    assert {slot for slot in ("0", "2") if any(slot in change.slot for change in session.changes)} == {"0", "2"}
    session.close()
    session = pare.apply(pare.Plan.uniform(frozen=NF4), closed)
    session.close()
    exact = closed.merge_and_unload()(x).detach()
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-5)
    assert (found - expected).norm() > 20 * (exact - expected).norm()
