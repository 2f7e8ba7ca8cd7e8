"""The predicted bytes of activations, against the bytes that are held after a forward pass on the CPU.

The oracle walks autograd's graph itself: storages that saved tensors keep unpacked, beside the bytes that the session stores packed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown.apply_plan import apply
from paredown.assignment.assign import assign
from paredown.assignment.assignment_problem import AssignmentProblem
from paredown.assignment.strategies import METHODS
from paredown.models import MODELS, OF_TEXT, random_batch
from paredown.models.transformer import token_loss
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.predict.trace_step import trace_step
from paredown.roles import Role

PLANS = ("int8/64@bf16", "uint4/64@bf16+bf16", "uint2/64@bf16+bf16")


def plainly_held(loss: Tensor, known: set[int]) -> int:
    """Bytes of unique storages that nodes behind `loss` hold without hooks, but for the `known` ones."""
    pending, seen, storages = [loss.grad_fn], set[Any](), dict[int, int]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [before for before, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, tuple | list) else (raw,):
                if one.unpack_hook is None and isinstance(one.data, Tensor):
                    storage = one.data.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for address, nbytes in storages.items() if address not in known)


@pytest.mark.parametrize("num", [4, 16])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit", "gpt", "lstm", "unet", "convnext"])
def test_activations_under_plans_within_3_percent(name: str, num: int) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), random_batch(name, num)
    loss_fn = token_loss if name in OF_TEXT else nn.functional.cross_entropy
    trace = trace_step(model, batch, loss=loss_fn, optimizer="sgdm", device="cpu")
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    for text in PLANS:
        plan = Plan.uniform(activation=text)
        with apply(plan, model) as session:
            output = model(batch[0])
            held = {*known, output.untyped_storage().data_ptr()}
            loss = loss_fn(output, batch[1])
            measured = session.stored_bytes + plainly_held(loss, held)
            predicted = footprint(trace, plan).by_role[Role.ACTIVATION]
            assert predicted == pytest.approx(measured, rel=0.03), text
            loss.backward()


@pytest.mark.parametrize("name", ["resnet18", "vit", "gpt", "unet"])
@pytest.mark.parametrize("method", ["role", "random"])
def test_activations_under_assigned_plans_within_3_percent(name: str, method: str) -> None:
    """Plans that keep some slots, quantize others to several formats, and recompute some from others."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), random_batch(name, 16)
    loss_fn = token_loss if name in OF_TEXT else nn.functional.cross_entropy
    trace = trace_step(model, batch, loss=loss_fn, device="cpu")
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    least, written = AssignmentProblem.of(trace, METHODS[method]).smallest.peak_bytes, footprint(trace).peak_bytes
    for share in (0.7, 0.3):
        plan = assign(trace, int(least + share * (written - least)), method=method, recompute=False)
        with apply(plan, model) as session:
            output = model(batch[0])
            held = {*known, output.untyped_storage().data_ptr()}
            loss = loss_fn(output, batch[1])
            measured = session.stored_bytes + plainly_held(loss, held)
            assert footprint(trace, plan).by_role[Role.ACTIVATION] == pytest.approx(measured, rel=0.03), share
            loss.backward()
            asked = [change for change in session.changes if change.slot[:1].isalpha() and "fewer" not in change.reason]
            assert not [change for change in asked if "would take" in change.reason or "pinned" in change.reason], (
                "it asks for what it gets"
            )
