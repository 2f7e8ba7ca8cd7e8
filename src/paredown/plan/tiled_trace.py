"""`tiled_trace` predicts the trace of a step whose modules run over pieces of the sequence, from the trace without these tiles.

What a module allocates inside is replaced by what its pieces need (`TokenModule`, which `trace_step` measures): in forward, and in backward
with sums of the gradients of its parameters. Its input is stored until its backward is done. Its output, and the gradients of input and
output, exist as a whole while pieces run.

    baseline    inside  |##############################|            output            |######
    tiles       piece   |####|                  |######|            output   |###############
                input   |##############################|            gradient of the input        |#######

Tiles are applied before activation checkpointing: in a checkpointed layer, the second forward pass saves the input of a tiled module, and
ends there if nothing after it is saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from paredown.autograd.operations import TILE_INPUT, Use
from paredown.errors import PlanError
from paredown.plan.checkpointed_trace import CALL, TILES, is_inside, is_of, modules_of, outermost
from paredown.plan.plan import TILED
from paredown.plan.trace import Output, Part, Saver, Slot, TokenModule, Trace
from paredown.roles import Role

Tiles = tuple[tuple[str, int], ...]
NONE_INSIDE = (
    "tiles of {!r}: {}. Name modules that act on tokens one by one, such as MLPs and norms, or the layers that contain them."
)
IN_GRAPHS = "compiled sessions run no tiles: leave them out (replace(plan, tiles=())), or do not compile."
NOT_RECORDED = "the trace has no modules that run in tiles, since an earlier paredown made it: trace the step again."
SHORT = "{} runs whole, and so do {} other modules in tiles, where sequences have no more tokens than a piece"


def tiled_modules(trace: Trace, rules: Tiles) -> list[tuple[TokenModule, int]]:
    """Return (module, tokens of a piece) for each module that runs over pieces of the sequence under `rules`.

    A rule is (path or pattern of modules, tokens). Raise PlanError for a rule that no module can follow.
    """
    if trace.is_compiled:
        raise PlanError(IN_GRAPHS)
    if not trace.token_modules:
        raise PlanError(NOT_RECORDED)
    paths, lengths = {module.path: module for module in trace.token_modules}, dict[str, int]()
    for text, length in rules:
        for match in outermost([*modules_of(trace), *paths], (text,), what="tile"):
            inside = [module for module in trace.token_modules if is_inside(module.path, match)]
            found = [module.path for module in inside if not module.whole and (not module.is_linear or module.path == match)]
            if not found:
                reason = next((module.whole for module in inside if module.whole), "it was not called once")
                raise PlanError(NONE_INSIDE.format(text, f"{match} has none, since {reason}"))
            lengths |= dict.fromkeys(found, length)
    chosen = (path for path in lengths if not any(path != other and is_inside(path, other) for other in lengths))
    return [(paths[path], lengths[path]) for path in chosen]


def tiled_trace(trace: Trace, rules: Tiles) -> Trace:
    """Return the trace of the same step if the modules that `rules` name run over pieces of the sequence (tiles).

    The last result is cached on the trace.
    """
    if not rules:
        return trace
    cached: tuple[Tiles, Trace] | None = vars(trace).get("_tiled_trace")
    if cached is None or cached[0] != rules:
        found = tiled_modules(trace, rules)
        short = [module.path for module, length in found if module.tokens <= length]
        notes = [SHORT.format(short[0], len(short) - 1)] if short else []
        step = _TiledStep(trace, [(module, length) for module, length in found if module.tokens > length]).trace()
        cached = vars(trace)["_tiled_trace"] = rules, replace(step, notes=(*trace.notes, *notes))
    return cached[1]


def piece_bytes(pairs: Iterable[tuple[int, int]], length: int) -> int:
    """Return the most bytes that a piece of `length` tokens takes: the largest fixed + by_token * length of `pairs`.

    >>> piece_bytes(((100, 2), (10, 4)), 20), piece_bytes(((100, 2), (10, 4)), 100)
    (140, 410)
    """
    return max((fixed + by_token * length for fixed, by_token in pairs), default=0)


class _TiledStep:
    """Converts the trace of a step to that in which the modules `tiled` run over pieces of the sequence (tiles)."""

    def __init__(self, trace: Trace, tiled: list[tuple[TokenModule, int]]) -> None:
        self._before, self._tiled = trace, sorted(tiled, key=lambda pair: -pair[0].forward[0])  # as backward runs them
        self._places = {module.path: place for place, (module, _) in enumerate(self._tiled)}
        self._forward = sorted((module.forward, place) for place, (module, _) in enumerate(self._tiled))
        self._backward = sorted((module.backward, place) for place, (module, _) in enumerate(self._tiled))

    def trace(self) -> Trace:
        slots, outputs = list[Slot](), list[Output]()
        for row in (*self._before.outputs, *self._before.slots):
            kept: Slot | Output | None = row
            for place in self._near(row):
                module = self._tiled[place][0]
                if isinstance(kept, Slot):
                    kept = _slot(kept, module, self._before.length)
                elif kept is not None:
                    kept = _output(kept, module)
            slots += [kept] if isinstance(kept, Slot) else []
            outputs += [kept] if isinstance(kept, Output) else []
        slots += self._unsaved_inputs(slots, outputs)
        outputs += [output for module, length in self._tiled for output in _pieces(module, length)]
        return replace(self._before, slots=tuple(self._with_weights(slots)), outputs=tuple(outputs))

    def _near(self, row: Slot | Output) -> list[int]:
        """Return the indices of modules run over pieces that may change a tensor or allocation, as backward runs."""
        found = {self._at(self._forward, row.birth), self._at(self._backward, row.birth), self._at(self._backward, row.birth - 1)}
        found |= {self._at(self._backward, row.used)} if isinstance(row, Output) else {self._around(row.module)}
        found |= {self._around(saver.name) for saver in row.savers} if isinstance(row, Slot) else set()
        return sorted(found - {-1})

    @staticmethod
    def _at(spans: list[tuple[tuple[int, int], int]], tick: int) -> int:
        """Return the index of the module that runs at `tick`, or -1; `spans` has ((first tick, last tick), index)."""
        before = bisect_right(spans, tick, key=lambda pair: pair[0][0]) - 1
        return spans[before][1] if before >= 0 and tick <= spans[before][0][1] else -1

    def _around(self, name: str) -> int:
        """Return the index of the module run over pieces that contains the module or saved tensor `name`, or -1."""
        parts = CALL.sub("", name.partition(":")[0]).split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((self._places[path] for path in paths if path in self._places), -1)

    def _unsaved_inputs(self, slots: list[Slot], outputs: list[Output]) -> list[Slot]:
        """Return new slots (tensors): inputs saved only since modules run over pieces; name them in `outputs`."""
        number = max((slot.storage for slot in slots), default=-1)
        missing = set(self._places) - {saver.name.partition(":")[0] for slot in slots for saver in slot.savers if saver.op == TILES}
        found: list[Slot] = []
        for place, output in enumerate(outputs):
            path = next((name.partition(":")[0] for name in output.inputs if name.partition(":")[0] in missing), None)
            if path is not None and not output.slot:
                found.append(_input_of(output, self._tiled[self._places[path]][0], number + 1 + len(found)))
                outputs[place] = replace(output, slot=found[-1].name)
                missing.discard(path)
        return found

    def _with_weights(self, slots: list[Slot]) -> Iterator[Slot]:
        """Yield `slots`, where packed weights of modules in tiles are decoded one at a time in backward.

        So only the largest weight of a module has a decoded copy while pieces run.
        """
        places = {slot.name: self._around(slot.module) for slot in slots if slot.role is Role.WEIGHT}
        weights = sorted((slot for slot in slots if slot.role is Role.WEIGHT), key=lambda slot: slot.nbytes)
        largest = {places[slot.name]: slot.name for slot in weights}
        for slot in slots:
            place = places[slot.name] if slot.role is Role.WEIGHT else -1
            if place < 0:
                yield slot
            else:
                span = (_second_pass(self._tiled[place][0]),) if largest[place] == slot.name else ()
                yield replace(slot, running=(*slot.running, *span), parts=())


def _pieces(module: TokenModule, length: int) -> Iterator[Output]:
    """Yield the two allocations that stand for all pieces of `length` tokens: one in forward, one in backward."""
    for (first, last), phase, pairs in (
        (module.forward, "forward", module.in_forward),
        (_second_pass(module), "backward", module.in_backward),
    ):
        nbytes = piece_bytes(pairs, length)
        yield Output(TILES, module.path, phase, (nbytes,), "uint8", nbytes, first, last)


def _second_pass(module: TokenModule) -> tuple[int, int]:
    """Return the first and last operation (tick) of backward while the pieces of `module` run.

    The first one of the module's backward is left out, since the layer around the module may run again in it.
    """
    first, last = module.backward
    return min(first + 1, last), last


def _output(output: Output, module: TokenModule) -> Output | None:
    """Return the allocation `output` as it is if `module` runs over pieces of the sequence; None if it is inside."""
    (start, end), (first, last) = module.forward, module.backward
    if output.phase == "forward" and start <= output.birth <= end:
        return replace(output, birth=start) if output.death > end else None  # the module's output
    if output.phase == "backward" and output.slot != "gradient" and first <= output.birth - (output.op == "add") <= last:
        # the gradient of the module's input; a sum in place is born a tick after its operation
        return replace(output, birth=_second_pass(module)[0]) if output.death > last else None
    if output.phase != "forward" and output.birth < first <= output.used <= last:  # the gradient of the module's output
        return replace(output, death=max(output.death, last))
    return output


def _slot(slot: Slot, module: TokenModule, length: int) -> Slot | Output | None:
    """Return the tensor `slot` as it is stored if `module` runs over pieces of the sequence (tiles).

    It becomes an allocation if no operation saves it any more, and None if it is inside of the module. `length` is the step's last tick.
    """
    start, end = module.forward
    if slot.role is Role.GRADIENT and module.backward[0] <= slot.birth <= module.backward[1]:
        birth = min(module.backward[1] + 1, length)
        is_released = slot.death < length
        dropped = max(slot.dropped, birth)
        return replace(slot, birth=birth, dropped=dropped, death=dropped if is_released else slot.death)
    is_made_inside = start <= slot.birth <= end
    if slot.role is Role.TEMPORARY and is_made_inside:  # the cast of a weight
        return None
    is_saved = any(is_of(saver.name, module.path) for saver in slot.savers)
    if slot.role is not Role.ACTIVATION or not (is_made_inside or is_saved):
        return slot
    return _made_inside(slot, module) if is_made_inside else _saved_input(slot, module)


def _made_inside(slot: Slot, module: TokenModule) -> Slot | Output | None:
    """Return the tensor `slot`, created in `module`, as it is if pieces run; None unless it is the module's output."""
    start, end = module.forward
    savers = tuple(saver for saver in slot.savers if not is_of(saver.name, module.path))
    if savers:
        parts = tuple(part for part in slot.parts if any(saver.use is part.use for saver in savers))
        return replace(slot, name=savers[0].name, savers=savers, parts=parts, birth=start, recomputed_from="")
    if slot.stays or slot.dropped <= end:
        return None
    return Output("saved", slot.module, "forward", slot.shape, slot.dtype, slot.nbytes, start, slot.dropped, inputs=slot.inputs)


def _saved_input(slot: Slot, module: TokenModule) -> Slot:
    """Return the saved tensor (slot) of an input, stored unmodified until `module` has run backward over its pieces."""
    others = tuple(saver for saver in slot.savers if not is_of(saver.name, module.path))
    parts = tuple(part for part in slot.parts if any(saver.use is part.use for saver in others))
    saver, part = _saver(module), _part(module)
    death = max(slot.death, module.backward[1])
    parts = (*(kept for kept in parts if kept.use is not Use.EXACT), part)
    name = slot.name if any(other.name == slot.name for other in others) else (*others, saver)[0].name
    stays = slot.stays or TILE_INPUT
    return replace(slot, name=name, savers=(*others, saver), parts=parts, stays=stays, death=death, recomputed_from="")


def _input_of(output: Output, module: TokenModule, storage: int) -> Slot:
    """Return a saved tensor (slot) for `output`, an input of `module` that is saved only since it runs over pieces."""
    of_output = output.shape, output.dtype, output.nbytes, output.birth, max(output.death, module.backward[1])
    saver, dropped = _saver(module), max(output.death, module.forward[1])
    rest = prod(output.shape), storage, dropped, (saver,), (_part(module),)
    return Slot(saver.name, Role.ACTIVATION, module.path, *of_output, *rest, stays=TILE_INPUT, inputs=output.inputs)


def _saver(module: TokenModule) -> Saver:
    return Saver(f"{module.path}:{TILES}.input", TILES, "input", Use.EXACT)


def _part(module: TokenModule) -> Part:
    return Part(Use.EXACT, module.forward[0], module.backward[1], (module.backward,))


def say_tiles(rules: Tiles) -> list[str]:
    """Return one text for each length of pieces (tiles), with the modules that run over pieces of that length.

    >>> say_tiles((("layers.*", 64), ("head", 64)))
    ['in tiles of 64 tokens: layers.*, head']
    """
    lengths = dict.fromkeys(length for _, length in rules)
    return [f"{TILED.format(length)}: {', '.join(text for text, of in rules if of == length)}" for length in lengths]
