"""Traces from strangers that contradict themselves are refused when they are read; those that are read can be planned for."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paredown as pare
from paredown.roles import Role
from tests.strangers.mutations import answers, places, thousands, wrong_json


class Net(nn.Module):
    """A norm, masks, views of one storage, and layers that can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(2)])
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A forward pass."""
        h = torch.relu(self.norm(self.conv(x))).amax(1).flatten(1)
        for layer in self.layers:
            h = nn.functional.dropout(nn.functional.gelu(layer(h)), 0.1) + h
        return self.head(h)


@lru_cache(maxsize=1)
def made() -> Any:
    """The JSON of a trace for a CPU, whose peak is all tensors, under autocast."""
    batch = torch.zeros(64, 1, 16, 16), torch.zeros(64, dtype=torch.int64)
    options: dict[str, Any] = {"optimizer": "adamw", "device": "cpu", "autocast": torch.bfloat16}
    return json.loads(json.dumps(pare.trace_step(Net(), batch, loss=nn.functional.cross_entropy, **options).to_json()))


def planned_for(value: Any) -> None:
    """All that is made of a trace: words, footprints, plans."""
    trace = pare.Trace.from_json(value)
    presets = [pare.Plan(), *(pare.Plan.preset(name) for name in ("activations4", "lpmm"))]
    assert all(repr(pare.footprint(trace, plan)) for plan in presets) and repr(trace)
    answers(lambda: repr(pare.footprint(trace, presets[1].recomputing("layers.0"))))
    peak_bytes = pare.footprint(trace).peak_bytes
    answers(lambda: pare.assign(trace, int(0.7 * peak_bytes)))


def test_a_right_trace_is_read_and_planned_for() -> None:
    planned_for(made())
    assert pare.Trace.from_json(made()).to_json() == made()


TIMES = ("birth", "death", "dropped", "packed", "released", "decoded", "running")
OTHERS = ("nbytes", "numel", "storage", "use", "name", "role", "shape", "parts", "savers")


@st.composite
def contradicting(draw: st.DrawFn) -> Any:
    """The right trace with up to three of its times, sizes, uses and names taken from other rows, nudged, or a row doubled."""
    value = copy.deepcopy(made())
    for _ in range(draw(st.integers(1, 3))):
        found = [(row, name) for row, name in places(value) if name in (*TIMES, *OTHERS)]
        row, name = found[draw(st.integers(0, len(found) - 1))]
        change = draw(st.sampled_from(("swap", "swap", "nudge", "nudge", "double")))
        if change == "nudge" and type(row[name]) is int:
            row[name] += draw(st.sampled_from((-100, -7, -1, 1, 7, 100)))
        elif change == "double":
            rows = value[draw(st.sampled_from(("slots", "outputs")))]
            rows.append(copy.deepcopy(rows[draw(st.integers(0, len(rows) - 1))]))
        else:
            same = [other[name] for other, key in found if key == name]
            row[name] = copy.deepcopy(same[draw(st.integers(0, len(same) - 1))])
    return value


@thousands(60)
@given(contradicting())
def test_a_trace_that_contradicts_itself_is_a_sentence_or_is_planned_for(value: Any) -> None:
    answers(lambda: planned_for(value))


@thousands(60)
@given(st.deferred(lambda: wrong_json(made())))
def test_a_wrong_trace_is_a_sentence_or_is_planned_for(value: Any) -> None:
    answers(lambda: planned_for(value))


def slot(value: Any, role: str = "activation", has: str = "parts") -> Any:
    """The first slot of a role that has such a field."""
    return next(row for row in value["slots"] if row["role"] == role and has in row)


def _value_part_alone(value: Any) -> None:
    """A part that holds values, of a slot of which backward needs a mask alone."""
    found = next(
        row for row in value["slots"] if row["role"] == "activation" and {p["use"] for p in row.get("parts", ())} == {"value"}
    )
    found["savers"] = [{**saver, "use": "mask"} for saver in found["savers"]]


def _second_size(value: Any) -> None:
    a, b = [row for row in value["slots"] if row["role"] == "activation" and "parts" in row][:2]
    b["storage"] = a["storage"]
    a["nbytes"] = b["nbytes"] + 2**20


CONTRADICTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dead before it is born": (lambda value: slot(value).update(birth=9, death=3), "no tensor ends before it begins"),
    "an output, too": (
        lambda value: value["outputs"][0].update(birth=9, death=3),
        "the output contradicts itself: born at 9, dead at 3",
    ),
    "born before the step": (
        lambda value: slot(value).update(birth=-5),
        r"slots\[\d+\]\.birth: a tick of the step, or -1, is needed here; this is -5",
    ),
    "negative bytes": (
        lambda value: slot(value).update(nbytes=-1),
        r"nbytes: a whole number from 0 to 2\^53 is needed here; this is -1",
    ),
    "a negative shape": (lambda value: slot(value).update(shape=[-1, 4]), r"shape\[0\]: a whole number from 0"),
    "released before packed": (lambda value: slot(value)["parts"][0].update(packed=9, released=3), "packed 9, released 3"),
    "decoded backwards": (lambda value: slot(value)["parts"][0].update(decoded=[[9, 3]]), "decoded from 9, to 3"),
    "values that nothing saved": (_value_part_alone, "a part for the use value, which no operation saved"),
    "two sizes of one storage": (_second_size, "storage [0-9]+ has"),
    "more values than bytes": (lambda value: slot(value, has="numel").update(numel=2**40), "values of .* in a storage of"),
    "one name twice": (lambda value: value["slots"].append(dict(slot(value))), "another slot has this role and name"),
    "a weight twice": (lambda value: value["slots"].append(dict(slot(value, "weight"))), "another slot has this role and name"),
    "bytes of another shape": (lambda value: slot(value, "weight").update(nbytes=12345), "shape .* 12345 bytes"),
    "more bytes than are counted": (
        lambda value: [row.update(nbytes=2**53) for row in value["outputs"][:33]],
        "fewer than 2\\^58 are supported",
    ),
    "backward after the end": (lambda value: value.update(backward_at=value["length"] + 1), "after the step's end"),
    "a phase that is none": (lambda value: value["outputs"][0].update(phase="sideways"), "phase of an output is one of"),
    "a pin of text": (
        lambda value: slot(value)["savers"][0].update(pin={"significant_bits": "7", "reason": ""}),
        r"savers\[0\]\.pin\.significant_bits: a whole number",
    ),
    "6,000 digits": (lambda value: slot(value).update(nbytes=10**6000), "this is a whole number of about 6001 digits"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_named_when_the_trace_is_read(case: str) -> None:
    change, said = CONTRADICTIONS[case]
    value = copy.deepcopy(made())
    change(value)
    with pytest.raises(pare.errors.TraceError, match=said):
        pare.Trace.from_json(value)


def test_assign_refuses_a_trace_made_by_hand_that_contradicts_itself() -> None:
    """A weight that stands twice, which a file may not have: no rules bring both down."""
    right = pare.Trace.from_json(made())
    twice = replace(right, slots=(*right.slots, max(right.of(Role.WEIGHT), key=lambda slot: slot.nbytes)))
    with pytest.raises(pare.errors.PlanError, match=r"slots of the trace contradict one another\. Trace the step again"):
        pare.assign(twice, int(0.8 * pare.footprint(twice).peak_bytes))
