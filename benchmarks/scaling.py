"""Memory and traffic of one of 8 and of 64 GPUs under fully_shard, for 8 and 70 billion parameters: python benchmarks/scaling.py

Arithmetic alone: `footprint` of a step that consists of the weights, gradients and moments of a decoder, without activations. The same
formulas are compared with four processes in tests/session/test_sharded.py. docs/scaling.md has the first table; a test compares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paredown import Plan, footprint
from paredown.plan.distribution import Communication, largest_unit_bytes
from paredown.plan.footprint import Footprint
from paredown.plan.trace import Slot, Trace
from paredown.roles import Role
from paredown.sizes import say_bytes

WORLD_SIZES = (8, 64)
LINK = 50e9  # bytes a second that a GPU sends: 400 Gbit/s
RATE = 4e14  # operations a second that a GPU computes in bf16, 40 % of an H100's or H200's peak
IN_8_BITS = "int8/64@bf16"


@dataclass(frozen=True)
class Decoder:
    """A decoder with grouped queries and a gated MLP, like Llama 3."""

    name: str
    dim: int
    layers: int
    hidden: int
    keys: int  # width of keys and of values
    vocabulary: int = 128256

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every parameter."""
        yield "embedding.weight", (self.vocabulary, self.dim)
        for i in range(self.layers):
            for name, shape in {
                "q": (self.dim, self.dim),
                "k": (self.keys, self.dim),
                "v": (self.keys, self.dim),
                "o": (self.dim, self.dim),
                "gate": (self.hidden, self.dim),
                "up": (self.hidden, self.dim),
                "down": (self.dim, self.hidden),
                "norm1": (self.dim,),
                "norm2": (self.dim,),
            }.items():
                yield f"layers.{i}.{name}.weight", shape
        yield "norm.weight", (self.dim,)
        yield "head.weight", (self.vocabulary, self.dim)


DECODERS = (Decoder("8B", 4096, 32, 14336, 1024), Decoder("70B", 8192, 80, 28672, 1024))


def step_of(decoder: Decoder) -> Trace:
    """A step with the parameters of `decoder` in float32 and AdamW: layer i runs at tick i, and at tick 2 layers - i in backward."""
    end, slots = 2 * decoder.layers + 2, list[Slot]()
    for name, shape in decoder.shapes():
        numel = shape[0] * (shape[1] if len(shape) > 1 else 1)
        module, place = name.removesuffix(".weight"), int(name.split(".")[1]) + 1 if name.startswith("layers") else 0
        values = {"shape": shape, "dtype": "float32", "nbytes": 4 * numel, "numel": numel}
        back = end - 1 - place
        slots.append(Slot(name, Role.WEIGHT, module, birth=0, death=end, running=((place, place),), **values))
        slots.append(Slot(name, Role.GRADIENT, module, birth=back, death=end, dropped=back, **values))
        slots += [Slot(name, role, module, birth=0, death=end, **values) for role in (Role.MOMENT1, Role.MOMENT2)]
    return Trace(decoder.name, (), "cuda", "float32", "adamw", tuple(slots), (), end, decoder.layers + 1)


def methods(trace: Trace, world_size: int) -> Iterator[tuple[str, Footprint, Communication]]:
    """Name, footprint and traffic of each method."""
    plain = footprint(trace, world_size=world_size, strategy="fsdp2")
    sent = plain.communication  # MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32) gathers half of it
    yield "fully_shard, bf16 gathers", plain, Communication(sent.all_gather // 2, sent.reduce_scatter)
    for name in ("safe", "lpmm", "lpmm4"):
        foot = footprint(trace, Plan.preset(name), world_size=world_size, strategy="fsdp2")
        yield name, foot, foot.communication
    foot = footprint(trace, Plan.preset("lpmm"), world_size=world_size, strategy="fsdp2", reduction=IN_8_BITS)
    yield "lpmm, reduced in 8 bits", foot, foot.communication


def rows(decoder: Decoder) -> Iterator[list[str]]:
    """The rows of the table of one model."""
    trace = step_of(decoder)
    parameters = sum(slot.numel for slot in trace.of(Role.WEIGHT))
    for world_size in WORLD_SIZES:
        for name, foot, sent in methods(trace, world_size):
            reduced = sent.reduce_scatter + sent.all_to_all
            seconds = sent.total / LINK
            tokens = seconds * RATE / (6 * parameters)
            assert foot.distribution is not None
            unit = largest_unit_bytes(trace, foot.plan, foot.distribution) // (2 if foot.plan.changes_nothing else 1)
            sizes = [foot.model_bytes, unit, sent.all_gather, reduced, sent.total]
            yield [str(world_size), name, *map(say_bytes, sizes), f"{seconds:.2f} s", f"{tokens:,.0f}"]


COLUMNS = ["GPUs", "method", "stored", "buffer", "gathered", "reduced", "sent", "at 50 GB/s", "tokens to hide it"]


def table(decoder: Decoder) -> list[str]:
    """The table as lines of Markdown."""
    lines = [COLUMNS, ["---:", "---", *["---:"] * (len(COLUMNS) - 2)], *rows(decoder)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    for one in DECODERS:
        print(f"\n{one.name}: {sum(slot.numel for slot in step_of(one).of(Role.WEIGHT)):,} parameters\n")
        print("\n".join(table(one)))
