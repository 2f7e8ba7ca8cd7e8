"""The operations that random programs are made of: one row each of operations.txt, in Python text.

{a}, {b}, {c} are earlier values, {m} and {n} modules or parameters that the row makes, {k} an integer of 1 to 7, {f} a number of 0.25 to 2.
Text with {o} is a statement that assigns the result; other text is an expression. Values stay of the order of 1: programs are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Operation:
    """A row: its name, the form of its inputs and of its result, its text, and the modules that it owns."""

    name: str
    form: str
    text: str
    modules: tuple[str, ...] = ()
    kind: str = ""  # "random": draws random numbers; "writes": modifies an earlier value. Neither is repeatable in threads

    @property
    def num_inputs(self) -> int:
        """How many earlier values it takes."""
        return sum(f"{{{letter}}}" in self.text for letter in "abc")


def _read() -> tuple[Operation, ...]:
    """The rows of operations.txt: name | text | modules, with semicolons between them | kind; [form] begins those of a form."""
    found: list[Operation] = []
    form = ""
    for line in Path(__file__).with_name("operations.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            form = line.strip("[]")
        elif line and not line.startswith("#"):
            name, text, modules, kind = ([part.strip() for part in line.split("|")] + ["", ""])[:4]
            found.append(Operation(name, form, text, tuple(part.strip() for part in modules.split(";") if part), kind))
    return tuple(found)


OPERATIONS = _read()
BY_NAME = {operation.name: operation for operation in OPERATIONS}
