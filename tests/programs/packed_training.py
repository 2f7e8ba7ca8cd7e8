"""Random programs that train with packed weights, gradients and moments beside packed activations, judged step by step.

Before every step a plain model gets the decoded weights (and the buffers) of the packed one. Then both run the same step:

    losses, gradients of inputs and of small parameters     the same bits. Where the plan packs activations in 8 bits, the plain model has
                                                            a session that packs activations alone
    gradients that are packed                               within one step of the format for every backward: a step is 1/127 of a block's
                                                            largest value, and stochastic rounding moves a value by up to one
    weights and moments after AdamW                         within one step of their formats of AdamW's definition in float64, from the
                                                            decoded weights, gradients and moments before

Every third weight may be frozen, and is stored in nf4 then. Rounding of bf16 scales is below 2^-8, and is part of every bound (SCALES).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paredown import Plan, Role, apply
from paredown.optim import AdamW
from paredown.optim.packed_weight import weight_of
from tests.programs.judging import INT8 as ROUNDED_INT8
from tests.programs.names import in_threads
from tests.programs.programs import THREADS, Program
from tests.programs.running import NO_NOISE, NUM_STEPS, Values, end_backward, forward_and_backward

BLOCK, SCALES = 64, 1.02
TIERS = ("lpmm", "lpmm4", "half", "safe")
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
ROUNDED = ROUNDED_INT8.floor  # of gradients under two sessions that pack activations in 8 bits, as in judging.py
EXACT, INT8 = "fp32", "int8/64@bf16"


def plan_of(number: int) -> Plan:
    """The plan of a program: a tier for weights, gradients and moments, nf4 for frozen weights, and activations exact or in 8 bits."""
    plan = Plan.preset(TIERS[number // 2 % len(TIERS)]).set("frozen", "nf4/64@bf16")
    return plan.set("activation", INT8 if number % 2 else EXACT)


def faults_of_packed_training(program: Program) -> list[str]:
    """What is wrong with three steps of a program under its plan."""
    model = build(program)
    if not any(p.requires_grad for p in model.parameters()):
        return []  # a program of functions alone
    session = apply(plan_of(program.number), model, seed=program.number)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    faults, plain = list[str](), build(program)
    if program.number % 2:  # open during all steps: what a later pass stores may depend on what an earlier one has found
        apply(Plan.uniform(activation=INT8), plain, seed=program.number)
    for step in range(NUM_STEPS):
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        found, expected = stepped(program, model, step), stepped(program, plain, step)
        wrong = [*gradient_faults(program, found, expected), *update_faults(model, optimizer, session.plan)]
        faults += [f"step {step}: {fault}" for fault in wrong]
        optimizer.zero_grad()
    num_packed, left = sum(weight_of(p) is not None for p in model.parameters()), session.stored_bytes
    faults += [f"{left} bytes are stored after the last backward"] if left else []
    decoded = {name: p.detach().clone() for name, p in model.named_parameters()}
    session.close()
    faults += [f"{name} is another one after close()" for name, p in model.named_parameters() if not torch.equal(p, decoded[name])]
    return faults + ([f"{num_packed} weights are packed after close()"] if any(map(weight_of, model.parameters())) else [])


def build(program: Program) -> nn.Module:
    """The model of a program; every third matrix of every third program is frozen, unless it is the only one."""
    model = program.build(None)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    for parameter in matrices[1::3] if program.number % 3 == 0 else ():
        parameter.requires_grad_(False)
    return model


Step = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]


def stepped(program: Program, model: nn.Module, step: int) -> Step:
    """Losses; gradients by name, decoded; and the largest magnitudes in blocks of the sums after each backward, added up."""
    return in_threads(lambda: _stepped(program, model, step))[0]


def _stepped(program: Program, model: nn.Module, step: int) -> Step:
    generator, values = torch.Generator().manual_seed(1000 * program.number + step), Values(NO_NOISE)
    torch.manual_seed(1000 * program.number + step)
    losses, inputs, held, sizes = list[Tensor](), list[Tensor](), list[Any](), dict[str, Tensor]()
    for _ in range(program.options.num_accumulated):
        losses.append(forward_and_backward(program, model, values, generator, inputs, held))
        for name, p in model.named_parameters():
            if p.grad is not None and p.dim() > 1:
                size = num_sums(program) * largest_in_blocks(p.grad.detach().clone().float())
                sizes[name] = size + sizes.get(name, 0)
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {place}": x.grad.clone() for place, x in enumerate(inputs) if x.grad is not None}
    held.clear()
    end_backward(program.options.device)
    return losses, gradients, sizes


def num_sums(program: Program) -> int:
    """How often one call of backward adds to a gradient, at most: the checkpoints with use_reentrant=True each add on their own."""
    return (1 + program.options.retains_graph) * (1 + sum("reentrant" in line.operation for line in program.lines))


def num_uses(program: Program, name: str) -> int:
    """How often the forward passes of a step use the module of a parameter, or the parameter; 1 for inputs of the program."""
    place = name.split(".")[1] if "." in name else ""
    return program.options.num_forwards * (str(program).count(f"self.{place}") - 1) if place else 1


def largest_in_blocks(values: Tensor) -> Tensor:
    """For each value the largest magnitude of its block: 64 values along a row, the last of which may be short."""
    rows = values.reshape(values.shape[0], -1).abs()
    parts = [part.amax(1, keepdim=True).expand_as(part) for part in rows.split(BLOCK, dim=1)]
    return torch.cat(parts, dim=1).reshape(values.shape)


def gradient_faults(program: Program, found: Step, expected: Step) -> list[str]:
    """The losses and gradients that are not those of the plain model."""
    faults = ["the loss is not the same bit for bit"] if not torch.equal(torch.stack(found[0]), torch.stack(expected[0])) else []
    faults += [f"{name} is in one of them only" for name in found[1].keys() ^ expected[1].keys()]
    for name in found[1].keys() & expected[1].keys():
        mine, theirs = found[1][name].float(), expected[1][name].float()
        if torch.equal(mine, theirs):
            continue
        is_packed = name in expected[2] and mine.numel() >= 4096
        allowed = SCALES * expected[2][name] / 127 if is_packed else torch.zeros(())
        if is_packed and found[1][name].dtype is torch.bfloat16:  # the plain sum is rounded, and so is what is decoded
            allowed = allowed + program.options.num_accumulated * 2.0**-8 * (theirs.abs() + allowed)
        if program.options.dtype != "float32" and (uses := num_uses(program, name)) > 1:
            # Autograd adds gradients of several uses in bfloat16, in the order of its nodes, and packed weights have nodes of their own.
            # Under autocast they are added in float32, since each call of a module casts a packed weight anew (session/weights).
            allowed = allowed + uses * 2.0**-8 * theirs.abs().max()
        if program.number % 2 and program.options.structure == THREADS:
            # Of two threads the one that saves a tensor first decides how it is stored: 105 differs from itself, without packed weights
            # too, in one run of five. The sum of its errors is judged then.
            mean = theirs.square().mean().sqrt()
            mine, theirs, allowed = (mine - theirs).square().mean().sqrt(), torch.zeros(()), allowed.mean() + ROUNDED * mean
        off = float(((mine - theirs).abs() - allowed).max())
        faults += [f"the gradient of {name} is {off:.3g} beyond what is allowed"] if not off <= 0 else []
    return faults


def update_faults(model: nn.Module, optimizer: AdamW, plan: Plan) -> list[str]:
    """Make a step of the optimizer; the packed weights and moments that are not within a step of what AdamW defines."""
    packed = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None and weight_of(p) is not None
    ]
    places = {id(p): place for place, p in enumerate(optimizer.param_groups[0]["params"])}
    before = [(p.detach().clone().double(), _decoded(p.grad).double()) for _, p in packed]
    old = optimizer.export_state()["state"]
    optimizer.step()
    new, faults = optimizer.export_state()["state"], list[str]()
    for (name, p), (weight, gradient) in zip(packed, before, strict=True):
        state, last = new[places[id(p)]], old.get(places[id(p)], {})
        first, second = (last.get(key, torch.zeros(())).double() for key in ("exp_avg", "exp_avg_sq"))
        m, v = BETAS[0] * first + (1 - BETAS[0]) * gradient, BETAS[1] * second + (1 - BETAS[1]) * gradient.square()
        count = float(state["step"])
        root = (v / (1 - BETAS[1] ** count)).sqrt() + EPS
        expected = weight * (1 - LR * DECAY) - LR * m / (1 - BETAS[0] ** count) / root
        checked = {"weight": (p.detach().clone(), expected), "moment1": (state["exp_avg"], m), "moment2": (state["exp_avg_sq"], v)}
        if plan.find((name,), Role.RESIDUE).format is not None:
            del checked["weight"]  # the 8 bits beyond bf16 are not part of the decoded values
        for role, (stored, exact) in checked.items():
            off = beyond_a_step(str(plan.find((name,), Role(role)).format), stored, exact)
            faults += [f"{role} of {name} is {off:.3g} beyond a step of its format"] if not off <= 0 else []
    return faults


def _decoded(gradient: Any) -> Tensor:
    """A gradient, packed or not, in float32."""
    return gradient.decode(torch.float32) if hasattr(gradient, "decode") else gradient.detach().float()


def beyond_a_step(format: str, stored: Tensor, exact: Tensor) -> float:
    """How far the worst value is beyond one step of the format from where it belongs; 0 or less where all are within.

    Second moments are stored as their square root, in 4 bits as about their fourth root (within 7 %), and their codes are at least 1.
    """
    is_bfloat16, stored = stored.dtype is torch.bfloat16, stored.double()
    slack = exact.abs() * (2.0**-7 if is_bfloat16 else 2.0**-20) + 1e-12  # of the dtype that values are decoded in
    if format == "bf16":
        allowed = SCALES * torch.maximum(exact.abs(), stored.abs()) * 2.0**-7
    elif format.startswith("uint"):
        power, num_steps, near = (0.5, 255, 2.0**-18) if "8" in format[:5] else (0.25, 15, 0.08)
        stored, exact = stored**power, exact**power
        allowed = SCALES * largest_in_blocks(exact) / num_steps + near * torch.maximum(exact, stored) + 1e-7
    else:
        num_steps, near = 127 if format.startswith("int8") else 7, 2.0 if format.endswith("e8m0") else 1.0
        allowed = SCALES * near * largest_in_blocks(exact) / num_steps
    return float(((stored - exact).abs() - allowed - slack).max())
