"""The session itself: its changes, its state, its errors; and the model keeps its class, names and hooks."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from paredown import Plan, Session, apply, optim
from paredown.errors import ApplyError, PlanError
from paredown.models import MODELS, random_batch
from tests.session.nets import INT4, INT8, activations, assert_same, relative_error, rows, step


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))


def hooks_of(model: nn.Module) -> int:
    """Hooks of every kind on every module."""
    names = [name for name in vars(nn.Module()) if "hook" in name]
    return sum(
        len(getattr(module, name)) for module in model.modules() for name in names if hasattr(getattr(module, name), "__len__")
    )


def test_close_gives_the_plain_model_back() -> None:
    net = small()
    plain, before = step(net, rows()), hooks_of(net)
    session = apply(activations(INT4), net)
    assert hooks_of(net) > before
    assert relative_error(step(net, rows()), plain) > 1e-3
    session.close()
    assert hooks_of(net) == before
    assert_same(step(net, rows()), plain)
    session.close()
    assert repr(session) == "Session(Sequential, 1 forward pass, closed, activations 14.00 KiB instead of 96.00 KiB, 15 %)"


def test_a_graph_outlives_its_session() -> None:
    net = small()
    expected = None
    for closes in (False, True):
        net.zero_grad()
        session = apply(activations(INT4), net)
        loss = net(rows()).square().sum()
        if closes:
            session.close()
        loss.backward()
        session.close()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        assert_same(found, expected or found)
        expected = found


def test_keys_and_types_of_the_state_stay() -> None:
    net = small()
    before = {name: (value.dtype, value.shape) for name, value in net.state_dict().items()}
    plain = small()
    with apply(activations(INT4), net):
        step(net, rows())
        assert {name: (value.dtype, value.shape) for name, value in net.state_dict().items()} == before
        plain.load_state_dict(net.state_dict())
        net.load_state_dict(small().state_dict())
    assert type(net) is nn.Sequential


def as_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def as_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, as_pickle, as_file])
def test_copies_are_plain_models(make: Any) -> None:
    net = small()
    plain = step(copy.deepcopy(net), rows())
    session = apply(activations(INT4), net)
    other = make(net)
    assert_same(step(other, rows()), plain)
    assert session.forwards == 0
    with apply(activations(INT4), other) as second:  # and may have a session of their own
        assert relative_error(step(other, rows()), plain) > 1e-3
        assert (session.forwards, second.forwards) == (0, 1)


def test_errors_are_sentences() -> None:
    net, plan = small(), activations(INT8)
    with pytest.raises(ApplyError, match="plan first, then the model"):
        apply(net, plan)  # type: ignore[arg-type]
    with pytest.raises(ApplyError, match=r"a Plan and a torch\.nn\.Module, not str and Sequential"):
        apply("int8", net)  # type: ignore[arg-type]
    session = apply(plan, net)
    with pytest.raises(ApplyError, match=r"this model has a session already: call its close\(\)"):
        apply(plan, net)
    with pytest.raises(ApplyError, match="this model has a session"):
        apply(plan, torch.nn.parallel.DataParallel(net))
    with pytest.raises(ApplyError, match="a part of this model has a session"):
        apply(plan, nn.Sequential(net, nn.ReLU()))
    with pytest.raises(ApplyError, match="a model that this is a part of"):
        apply(plan, net[1])
    session.close()
    apply(plan, net[0]).close()
    apply(plan, net).close()


def test_an_error_leaves_the_model_as_it_was() -> None:
    net = small()
    before = hooks_of(net)
    with apply(activations(INT8), net[0]), pytest.raises(ApplyError):
        apply(activations(INT8), net)
    assert hooks_of(net) == before


def test_patterns_that_match_nothing() -> None:
    net = small()
    session = apply(Plan.uniform(activation=INT8).set("layer9.*:input", INT4), net)
    with pytest.raises(PlanError, match=r"pattern 'layer9\.\*:input' matches no slot\. Closest"):
        net(rows())
    assert session.stored_bytes == 0
    session.close()
    apply(Plan.uniform().set("9:input", INT4), net)
    with pytest.raises(PlanError, match="'9:input' and the model has no such slot"):
        net(rows())


def test_patterns_choose() -> None:
    net = small()
    session = apply(Plan.uniform(activation=INT8).set("3:*", INT4).set("5:input", None), net)
    kept = net(rows())
    formats = {name: str(decision.format) for name, decision in session._activations.decisions.items()}
    assert formats == {"1:input": "uint8/64@bf16+bf16", "3:input": INT4, "4:output": "uint8/64@bf16+bf16", "5:input": "None"}
    # 1:input and 4:output have minimums, and 3:input is recomputed from it; 5:input is 4:result, which came first
    assert session.stored_bytes == 8704 + 8704 + 1024
    assert kept.grad_fn is not None


def test_a_few_unknown_slots_are_rows() -> None:
    net = small()
    session = apply(Plan.uniform().set("3:input", INT8).set("17:input", INT4).set("weight=0.weight", INT8), net)
    step(net, rows())
    assert [(row.slot, row.given) for row in session.changes if row.slot == "17:input"] == [("17:input", "nothing")]


def test_formats_of_gradients_and_moments_are_rows_without_an_optimizer_for_them() -> None:
    net = small()
    plain = step(net, rows())
    session = apply(Plan.uniform(gradient=INT8, moment1=INT8), net)
    assert_same(step(net, rows()), plain)
    assert {(row.slot, row.asked, row.given) for row in session.changes} == {
        (r, INT8, "unmodified") for r in ("gradient", "moment1")
    }


def test_changes_print_as_a_table() -> None:
    net = small()
    session = apply(activations(INT4), net)
    assert repr(session.changes) == "everything is as requested"
    step(net, rows())
    lines = repr(session.changes).splitlines()
    assert lines[0].split() == ["slot", "asked", "given", "why"]
    assert "0:input" in session.changes._repr_html_()
    assert {row.slot for row in session.changes} == {"0:input", "1:input", "4:output"}


@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_resuming_goes_on_with_the_same_bits(name: str) -> None:
    """Two steps, and one step, a new process's session, one step: the same gradients."""
    x, _ = random_batch(name, 4)

    def steps(session: Session, model: nn.Module, count: int) -> list[torch.Tensor]:
        return [g for _ in range(count) for g in step(model, x, loss=lambda y: y.square().mean())]

    model = MODELS[name]()
    start = copy.deepcopy(model.state_dict())
    session = apply(activations(INT4, "stochastic"), model, seed=7)
    steps(session, model, 1)
    saved, weights = copy.deepcopy(session.state_dict()), copy.deepcopy(model.state_dict())
    expected = steps(session, model, 1)
    assert (saved["seed"], saved["forwards"]) == (7, 1)
    other = MODELS[name]()
    other.load_state_dict(weights)
    resumed = apply(Plan.from_json(saved["plan"]), other)
    without = steps(resumed, other, 1)
    assert not all(torch.equal(a, b) for a, b in zip(without, expected, strict=True))
    other.load_state_dict(weights)
    resumed.load_state_dict(pickle.loads(pickle.dumps(saved)))
    assert_same(steps(resumed, other, 1), expected)
    assert start.keys() == weights.keys()


def test_states_that_do_not_fit() -> None:
    session = apply(activations(INT8), small())
    with pytest.raises(ApplyError, match="not the state of a session"):
        session.load_state_dict({"seed": 1})
    with pytest.raises(ApplyError, match="another plan"):
        session.load_state_dict({**session.state_dict(), "plan": activations(INT4).to_json()})


def test_modules_called_one_by_one_pack_what_one_gives_to_the_next() -> None:
    net = small()
    plain = step(net, rows())
    session = apply(activations("fp32"), net)
    assert_same(step(net[:], rows()), plain)
    net.zero_grad()
    assert_same(step(nn.Sequential(*net), rows()), plain)
    assert session.forwards == 2 * len(net)
    session.close()
    with apply(activations(INT4), net):
        rounded = step(net[:], rows())
    assert 1e-3 < relative_error(rounded, plain) < 0.25, "what one module gives to the next is packed"


def test_explaining_a_plan_for_optimizers_alone_does_not_say_that_nothing_ran() -> None:
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    session = apply(Plan.uniform(moment1="int8/64@bf16"), net)
    optimizer = optim.AdamW(net.parameters())
    net(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    said = repr(session.explain())
    assert "no activation and no weight is packed" in said and "session.plan.explain()" in said
