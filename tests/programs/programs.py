"""Random programs: drawn from a number, printed as Python, and built as a module of up to three (nested) modules.

A line takes earlier values (of which each may be used often: a graph, not a chain) and makes one; the values that no line uses are added to
the last one. Lines belong to one of up to three blocks, each a module of its own: one after the other, the second inside of the first, or
the first two each in a thread of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs import names
from tests.programs.operations import BY_NAME, OPERATIONS, Operation

Note = Callable[[Tensor, int], Tensor]  # a value, and the number in its name
PLAIN, NESTED, THREADS = "one after the other", "nested", "threads"
MAX_LINES = 18
LAYERS = [BY_NAME[name] for name in ("linear", "gelu", "silu", "relu", "layer norm", "batch norm 1d", "norm, gelu, linear")]
TWIN = 40  # added to the number of a line for that of its twin


@dataclass(frozen=True)
class Options:
    """How a program is run."""

    device: str = "cpu"  # where parameters and inputs are
    dtype: str = "float32"  # or "bfloat16", or "autocast": bfloat16 in torch.autocast
    structure: str = PLAIN
    has_pool: bool = False  # threads have made nodes before
    is_channels_last: bool = False
    num_forwards: int = 1  # before one backward
    num_accumulated: int = 1  # backwards into the same gradients
    holds_outputs: bool = False  # the caller keeps the outputs of all steps
    needs_input_gradient: bool = False
    retains_graph: bool = False  # and calls backward twice
    returns_more: bool = False  # a dict with an inner value
    evaluates: bool = False  # a forward pass without gradients before each step
    calls_blocks: bool = False  # the step calls the blocks, one by one or in threads, and not the model

    def __str__(self) -> str:
        """Those that are not the default."""
        usual = Options()
        told = [f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(usual, name)]
        return ", ".join(told) or "none"


@dataclass(frozen=True)
class Line:
    """One operation: `output` = operation(`inputs`), in block 0, 1 or 2; `module` is the number in the names of what it owns."""

    operation: str
    output: str
    inputs: tuple[str, ...]
    block: int
    module: int
    k: int
    f: float

    @property
    def row(self) -> Operation:
        """Its row of the table."""
        return BY_NAME[self.operation]

    def modules(self) -> list[tuple[str, str]]:
        """(name, text) of what it owns."""
        return [(f"{letter}{self.module}", text) for letter, text in zip("mn", self.row.modules, strict=False)]

    def statement(self, values: Sequence[str]) -> str:
        """Its text, with the expressions of its inputs."""
        given = dict(zip("abc", values, strict=False))
        text = self.row.text.format(**given, o=self.output, m=f"m{self.module}", n=f"n{self.module}", k=self.k, f=self.f)
        return text if "{o}" in self.row.text else f"{self.output} = {text}"


@dataclass(frozen=True)
class Program:
    """A number, lines and options."""

    number: int
    lines: tuple[Line, ...]
    options: Options

    def source(self, *, note: str = "") -> str:
        """The module as Python text; `note` is the name of a function that every value goes through."""
        return Source(self, note).text()

    def __str__(self) -> str:
        return f"# program {self.number}, {len(self.lines)} operations; options: {self.options}\n{self.source()}"

    def build(self, note: Note | None = None) -> nn.Module:
        """The module, with parameters by the seed of its number."""
        space: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "note": note, **vars(names)}
        exec(compile(self.source(note="note" if note else ""), f"<program {self.number}>", "exec"), space)
        torch.manual_seed(self.number)
        model: nn.Module = space["Model"]()
        model = model.to(self.options.device, torch.bfloat16 if self.options.dtype == "bfloat16" else None)
        return model.to(memory_format=torch.channels_last) if self.options.is_channels_last else model  # type: ignore[call-overload]

    def without(self, line: Line) -> Program:
        """This program without a line: its first input stands for its result."""
        kept = [other for other in self.lines if other is not line]
        renamed = {line.output: line.inputs[0]}
        lines = (replace(other, inputs=tuple(renamed.get(name, name) for name in other.inputs)) for other in kept)
        return replace(self, lines=tuple(lines))


class Source:
    """Writes a program as Python text."""

    def __init__(self, program: Program, note: str) -> None:
        self.program, self.note = program, note
        self.forms = {"x": "rows", **{line.output: line.row.form for line in program.lines}}
        self.image = "image_last" if program.options.is_channels_last else "image"
        self.blocks = [[line for line in program.lines if line.block == block] for block in range(3)]
        used = {name for line in program.lines for name in line.inputs}
        self.ends = [line.output for line in program.lines if line.output not in used] or ["x"]

    def text(self) -> str:
        """All classes, the one that holds the others last."""
        is_nested = self.program.options.structure == NESTED and self.blocks[1]
        parts = [self._block(2)] if self.blocks[2] else []
        if is_nested:
            parts += [self._block(1), self._block(0, inner=1)]
        else:
            parts += [self._block(block) for block in (0, 1) if self.blocks[block]]
        return "\n".join([*parts, self._model(bool(is_nested))])

    def _block(self, block: int, inner: int | None = None) -> str:
        taken, made = self._taken(block, inner), self._made(block, inner)
        owned = [named for line in self.blocks[block] for named in dict(line.modules()).items()]
        owned += [(f"block{inner}", f"Block{inner}()")] if inner is not None else []
        body = [statement for line in self.blocks[block] for statement in self._statements(line)]
        body += [self._call(inner)] if inner is not None else []
        return _class(f"Block{block}", dict(owned), taken, [*body, f"return {', '.join(made)}"])

    def _model(self, is_nested: bool) -> str:
        calls = [block for block in range(3) if self.blocks[block] and not (is_nested and block == 1)]
        owned = {f"block{block}": f"Block{block}()" for block in calls}
        body: list[str] = []
        if self.program.options.structure == THREADS and calls[:2] == [0, 1]:
            both = [f"lambda: self.block{block}({', '.join(self._taken(block))})" for block in (0, 1)]
            targets = [_target(self._made(block)) for block in (0, 1)]
            # torch may deadlock where two threads first use one leaf that needs a gradient: they get a value that is none
            body.append("x = x * 1")
            pool = ", is_pool=True" * self.program.options.has_pool
            body.append(f"{targets[0]}, {targets[1]} = in_threads({both[0]}, {both[1]}{pool})")
            calls = calls[2:]
        body += [self._call(block, 1 if is_nested and block == 0 else None) for block in calls]
        result = " + ".join(self._as("rows", name) for name in self.ends)
        if self.program.options.returns_more and self.program.lines:
            result = f"{{'result': {result}, 'more': [{self.ends[0]}]}}"
        return _class("Model", owned, ["x"], [*body, f"return {result}"])

    def _statements(self, line: Line) -> list[str]:
        values = [self._as(line.row.form, name) for name in line.inputs]
        found = line.statement(values).split("; ")
        return [*found, f"{line.output} = {self.note}({line.output}, {line.output[1:]})"] if self.note else found

    def _as(self, form: str, name: str) -> str:
        return name if self.forms[name] == form else f"{self.image if form == 'image' else form}({name})"

    def _call(self, block: int, inner: int | None = None) -> str:
        made = self._made(block, inner)
        return f"{', '.join(made)} = self.block{block}({', '.join(self._taken(block, inner))})"

    def _lines(self, block: int, inner: int | None) -> list[Line]:
        return self.blocks[block] + (self.blocks[inner] if inner is not None else [])

    def _taken(self, block: int, inner: int | None = None) -> list[str]:
        """The values from outside that a block uses."""
        own = {line.output for line in self._lines(block, inner)}
        return list(dict.fromkeys(name for line in self._lines(block, inner) for name in line.inputs if name not in own))

    def _made(self, block: int, inner: int | None = None) -> list[str]:
        """The values of a block that others use."""
        lines = self._lines(block, inner)
        others = {name for line in self.program.lines if line not in lines for name in line.inputs}
        return [line.output for line in lines if line.output in others or line.output in self.ends] or [lines[-1].output]


def _target(made: list[str]) -> str:
    return made[0] if len(made) == 1 else f"({', '.join(made)})"


def _class(name: str, owned: dict[str, str], taken: list[str], body: list[str]) -> str:
    lines = [f"class {name}(nn.Module):"]
    if owned:
        made = [f"        self.{name} = {text}" for name, text in owned.items()]
        lines += ["    def __init__(self):", "        super().__init__()", *made, ""]
    return "\n".join([*lines, f"    def forward(self, {', '.join(taken)}):", *(f"        {line}" for line in body), ""])


def chain(operations: tuple[str, ...], block: int) -> list[Line]:
    """Lines of a block, each of which takes the value before it."""
    names = ["x", *(f"v{10 * block + place}" for place in range(len(operations)))]
    rows = enumerate(zip(operations, names, names[1:], strict=False))
    return [
        Line(name, made, (taken,) * BY_NAME[name].num_inputs, block, 10 * block + place, 5, 0.5)
        for place, (name, taken, made) in rows
    ]


def draw(number: int, attempt: int = 0) -> Program:
    """The program of a number; `attempt` counts those that PyTorch refused."""
    rng = random.Random(f"{number}, attempt {attempt}")
    options = _options(rng)
    has_twins = options.structure == THREADS and rng.random() < 0.6
    num_twins = 1 + int(rng.expovariate(1 / 3))
    count = min(MAX_LINES, 2 + int(rng.expovariate(1 / 6)))
    num_blocks = rng.randint(1, min(3, count)) if options.structure == PLAIN else rng.randint(2, min(3, count))
    blocks = sorted([*range(num_blocks), *(rng.randrange(num_blocks) for _ in range(count - num_blocks))])
    table = [row for row in OPERATIONS if not (row.kind and options.structure == THREADS)]
    lines: list[Line] = []
    for place, block in enumerate(blocks):
        if has_twins and block == 1:
            continue
        row = rng.choice(LAYERS if has_twins and rng.random() < 0.5 else table)
        lines.append(_line(rng, row, lines, (place, block), is_apart=options.structure == THREADS and block == 1))
        if has_twins and block == 0 and place < num_twins:
            lines.append(_twin(lines[-1], lines))
    calls_blocks = random.Random(f"{number}, entrance").random() < 0.2
    needs = options.needs_input_gradient or any("permute" in line.row.text for line in lines)  # as in `_options`, of channels_last
    return Program(number, tuple(lines), replace(options, needs_input_gradient=needs, calls_blocks=calls_blocks))


def _line(rng: random.Random, row: Operation, lines: list[Line], at: tuple[int, int], *, is_apart: bool) -> Line:
    """A line of `row`; one that is apart takes nothing of the first block."""
    place, block = at
    there = ["x", *(line.output for line in lines if not (is_apart and line.block == 0) and not (block == 0 and line.block == 1))]
    inputs = tuple(there[-1] if rng.random() < 0.5 else rng.choice(there) for _ in range(row.num_inputs))
    tied = [line.module for line in lines if line.row.modules == row.modules and line.block == block]
    module = rng.choice(tied) if tied and rng.random() < 0.7 else place
    return Line(row.name, f"v{place}", inputs, block, module, rng.randint(1, 7), rng.choice((0.25, 0.5, 0.75, 1.5, 2.0)))


def _twin(line: Line, lines: list[Line]) -> Line:
    """The same operation in the second block, with parameters of its own: nodes of both threads then have the same numbers.

    The second block ends before the first: in versions that took nodes of one number for one node, what followed was computed from the
    other thread's values.
    """
    renamed = {other.output: f"v{TWIN + int(other.output[1:])}" for other in lines if other.block == 0}
    inputs = tuple(renamed.get(name, name) for name in line.inputs)
    return replace(line, output=renamed[line.output], inputs=inputs, block=1, module=line.module + TWIN)


def _options(rng: random.Random) -> Options:
    is_channels_last = rng.random() < 0.3
    return Options(
        dtype=rng.choice(("float32", "float32", "float32", "bfloat16", "autocast")),
        structure=rng.choice((PLAIN, PLAIN, NESTED, THREADS)),
        is_channels_last=is_channels_last,
        num_forwards=rng.choice((1, 1, 1, 2)),
        num_accumulated=rng.choice((1, 1, 1, 2)),
        holds_outputs=rng.random() < 0.2,
        # torch 2.13 ends the process in the backward of a group norm whose channels_last input needs no gradient, on a CPU
        needs_input_gradient=rng.random() < 0.4 or is_channels_last,
        retains_graph=rng.random() < 0.15,
        returns_more=rng.random() < 0.2,
        evaluates=rng.random() < 0.2,
        has_pool=rng.random() < 0.5,
    )
