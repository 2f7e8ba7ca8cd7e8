"""Random traces: slots of all kinds with random sizes and lives, that no model needs to have made."""

from __future__ import annotations

from random import Random

from paredown.autograd.operations import EXPONENT, Use
from paredown.plan.trace import Output, Part, Saver, Slot, Trace
from paredown.roles import Role

OPS = ("conv", "linear", "gelu", "layer_norm", "batch_norm", "mul", "scaled_dot_product_attention")
BITS = (Use.SIGN, Use.MASK, Use.SHAPE)
FORWARD = 40  # ticks of the forward pass; backward takes as many, and the optimizer's step one


def random_trace(seed: int, *, num: int = 6, has_parameters: bool = True, is_simple: bool = False) -> Trace:
    """A trace of `num` activations; `is_simple`: independent ones of which values are needed, all there when backward begins."""
    source = Random(seed)
    slots = [simple_activation(source, i) for i in range(num)] if is_simple else activations(source, num)
    outputs = [_temporary(source) for _ in range(0 if is_simple else source.randrange(6))]
    optimizer = ""
    if has_parameters:
        optimizer = source.choice(("adamw", "sgdm", "sgd", ""))
        slots += [slot for i in range(source.randrange(4)) for slot in _parameter(source, i, optimizer)]
    ends = 2 * FORWARD + 1
    if optimizer and source.random() < 0.5:
        outputs.append(Output("optimizer.step", "", "step", (), "uint8", source.randrange(1, 1 << 20), ends, ends))
    device = source.choice(("cpu", "cuda"))
    return Trace("Random", (), device, "float32", optimizer, tuple(slots), tuple(outputs), ends, FORWARD)


def activations(source: Random, num: int) -> list[Slot]:
    """Activations of which some share a storage, follow from others, are pinned, stay, or are needed for a bit."""
    slots: list[Slot] = []
    for i in range(num):
        slot = simple_activation(source, i, is_any=True)
        changes = {}
        sources = [s for s in slots if not s.recomputed_from and not s.stays and s.uses == {Use.VALUE}]
        if sources and source.random() < 0.3:
            changes["recomputed_from"] = source.choice(sources).name
        if source.random() < 0.1:
            changes["stays"] = "the caller holds it"
        if slots and source.random() < 0.15:
            other = slots[-1]  # another view of its storage
            same = ("storage", "nbytes", "birth", "dropped", "numel", "dtype", "death")
            changes |= {name: getattr(other, name) for name in same}
            changes["parts"] = tuple(Part(p.use, other.dropped, other.death, p.decoded, p.bound) for p in slot.parts)
        slots.append(Slot(**{**vars(slot), **changes}))
    return slots


def simple_activation(source: Random, number: int, *, is_any: bool = False) -> Slot:
    """One that is saved in forward, and decoded where backward needs it, in the reverse order."""
    op, name = source.choice(OPS), f"layers.{number}:input"
    birth = source.randrange(FORWARD - 3)
    dropped = source.randrange(birth + 1, FORWARD - 1)
    back = 2 * FORWARD - birth + source.randrange(-2, 3) if is_any else 2 * FORWARD - birth
    use = source.choice(BITS) if is_any and source.random() < 0.2 else Use.VALUE
    pin = EXPONENT if op == "scaled_dot_product_attention" and is_any else None
    numel = source.randrange(4096, 1 << 18)
    dtype, width = source.choice((("float32", 4), ("bfloat16", 2))) if is_any else ("float32", 4)
    death = min(max(back, FORWARD + 1), 2 * FORWARD)
    part = Part(use, source.randrange(birth + 1, dropped + 1), death, ((death - 1, death),))
    saver = Saver(name, op, "input", use, pin)
    return Slot(
        name,
        Role.ACTIVATION,
        f"layers.{number}",
        (numel,),
        dtype,
        numel * width,
        birth,
        death,
        numel,
        number,
        dropped,
        (saver,),
        (part,),
    )


def _parameter(source: Random, number: int, optimizer: str) -> list[Slot]:
    """A weight, its gradient and its moments, in a network of its own."""
    name, ends = f"layers.{number}.weight", 2 * FORWARD + 1
    shape = (source.randrange(1, 200), source.randrange(1, 500))
    dtype, width = source.choice((("float32", 4), ("bfloat16", 2)))
    numel = shape[0] * shape[1]
    runs = source.randrange(FORWARD - 3)
    born = source.randrange(FORWARD + 1, ends)
    moments = {"adamw": (Role.MOMENT1, Role.MOMENT2), "sgdm": (Role.MOMENT1,)}.get(optimizer, ())

    def slot(role: Role, birth: int, **more: object) -> Slot:
        return Slot(name, role, f"layers.{number}", shape, dtype, numel * width, birth, ends, numel=numel, **more)  # type: ignore[arg-type]

    weight = slot(Role.WEIGHT, 0, parts=(Part(Use.VALUE, runs + 2, born, ((born - 1, born),)),), running=((runs, runs + 2),))
    return [weight, slot(Role.GRADIENT, born, dropped=born), *(slot(role, 0) for role in moments)]


def _temporary(source: Random) -> Output:
    birth = source.randrange(2 * FORWARD)
    size = source.randrange(1, 1 << 19)
    return Output("add", "", "forward", (size,), "uint8", size, birth, min(birth + source.randrange(6), 2 * FORWARD))
