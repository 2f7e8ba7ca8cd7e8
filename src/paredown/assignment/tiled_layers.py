"""Runs layers in tiles where `assign` finds no other plan that fits: tiles round nothing, but run MLPs, norms and projections once more.

Tiles are pieces of the sequence. Their lengths are tried from the longest on, since short pieces take the host longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paredown.assignment.checkpointed_layers import repeated_layers
from paredown.plan.checkpointed_trace import is_inside, modules_of
from paredown.plan.tiled_trace import Tiles, tiled_trace
from paredown.plan.trace import Trace

LENGTHS = (4096, 1024, 256)
SENTENCE = "Modules of {} layers that act on tokens one by one run over pieces of {} tokens."


def tiled_steps(trace: Trace) -> Iterator[tuple[Trace, Tiles]]:
    """Yield (trace, rules) of the step with layers that run over pieces of the sequence, longer pieces first.

    A rule is (path or pattern of modules, tokens of a piece), as in `Plan.tiles`.
    """
    modules = [module for module in trace.token_modules if not module.whole and not module.is_linear]
    layers = [path for path in repeated_layers(trace) if any(is_inside(module.path, path) for module in modules)] if modules else []
    longest = max((module.tokens for module in modules if any(is_inside(module.path, path) for path in layers)), default=0)
    order = {path: place for place, path in enumerate(modules_of(trace))}
    for length in LENGTHS:
        if length < longest:
            rules = tuple((path, length) for path in sorted(layers, key=lambda path: order[path]))
            plain = trace.without_packing
            without = None if plain is None else tiled_trace(plain, rules)
            yield replace(tiled_trace(trace, rules), without_packing=without, unmodified=None), rules  # tiles need a session


def say_tiled(tiles: Tiles) -> str:
    """Return a sentence for the reason of a plan about layers that run over pieces of the sequence; "" if none do."""
    return f" {SENTENCE.format(len(tiles), tiles[0][1])}" if tiles else ""
