"""`SavedReports` reads the nodes that a forward pass created and reports what they saved; `Watch` adds the hooks."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from paredown.autograd.checkpoints import REENTRANT, Checkpoints
from paredown.autograd.graph import (
    IN_PLACE_ON_VIEW,
    SAVES_NOTHING,
    ModuleCall,
    Named,
    Pass,
    Saved,
    attributes,
    describe,
    new_nodes,
    next_number,
    packable_bytes,
    saved_of,
)
from paredown.autograd.graph_parts import FoundAgain, Segment, point_of
from paredown.autograd.operations import OperationRow, row_of

is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
SavedAgain = Callable[[Saved, Any, Any, Tensor, frozenset[int]], None]


class SavedReports:
    """Reads autograd's graph and calls `on_saved` for each newly saved tensor.

    The subclass `Watch` decides when to read which part of the graph.
    """

    def __init__(self, model: nn.Module, on_saved: Callable[[Saved], None], min_numel: int) -> None:
        self._min_numel, self._on_saved = min_numel, on_saved  # tensors of fewer values are not reported
        self.on_saved_again: SavedAgain | None = None
        self.small: set[str] = set()  # names of activations below `min_numel`, collected in the first pass
        self.in_place_on_views: set[str] = set()  # modules that modified a view in place: what that saves is not reported
        self.collects_small = True  # whether the running pass collects names for `small`
        self._left_out, self._max_left_bytes = frozenset[str](), 0  # names of tensors that are not reported up to this size
        self.checkpoints = Checkpoints()

    def _report_again(self, current: Pass, values: Any, before: int | None = None) -> None:
        """Report the tensors saved by nodes that lead to `values`, on the paths of the last pass if these still exist.

        Only nodes of the pass `current` that were not read before are considered. `before`: the number of the first node of the call whose
        arguments `values` are; None if `values` are outputs.
        """
        key = current.calls[-1].path, before is not None
        segment = current.segments.get(key) if not current.is_branch else None
        tensors = segment.read_again(current, values, before) if segment is not None else None
        if tensors is None:
            current.segments.pop(key, None)
            self._report(current, values, before)
        else:
            self._report_tensors(current, tensors)

    def _report_tensors(self, current: Pass, tensors: list[FoundAgain]) -> None:
        """Report saved tensors that were found along the paths of an earlier pass."""
        if not tensors:
            return
        is_enabled, save_again, inputs = is_grad_enabled(), self.on_saved_again, current.inputs  # this module may run under no_grad
        set_grad_enabled(False)
        try:
            if save_again is not None:
                for t, node, raw, tensor in tensors:
                    save_again(t, node, raw, tensor, inputs)
                return
            for t, node, raw, tensor in tensors:
                kind = "input" if tensor.untyped_storage()._cdata in current.inputs else "activation"
                self._on_saved(t.again(kind, node, raw, tensor))
        finally:
            set_grad_enabled(is_enabled)

    def _report(self, current: Pass, values: Any, before: int | None = None) -> None:
        """Search the graph for new nodes that lead to `values`, and report what they saved, by the module calls that made them.

        `before`: the number of the first node of the call whose arguments `values` are; None if `values` are outputs.
        """
        point, counts = point_of(current, before), [dict(call.counts) for call in current.calls]
        nodes = new_nodes(values, current)
        current.unreached = (next_number() if before is None else before) - current.calls[0].first - len(current.seen)
        if current.is_branch:
            current.of_threads.update(node for _, node in nodes)
        reported = self._report_nodes(current, nodes) if nodes else []
        if not self._min_numel or current.is_branch or current.of_threads:
            return
        segment = Segment.of((point, counts), current, (nodes, reported), values)
        if segment is not None:
            current.segments[current.calls[-1].path, before is not None] = segment

    def _report_nodes(self, current: Pass, nodes: list[tuple[int, Any]]) -> list[tuple[int, Saved]]:
        innermost, reported = current.calls[-1], list[tuple[int, Saved]]()
        is_enabled = torch.is_grad_enabled()  # the model may have called this module under no_grad
        torch._C._set_grad_enabled(False)
        try:
            for number, node in nodes:
                call = innermost if innermost.first <= number else next(c for c in reversed(current.calls) if c.first <= number)
                reported += [(number, saved) for saved in self._report_node(node, current, call)]
        finally:
            torch._C._set_grad_enabled(is_enabled)
        return reported

    def _report_node(self, node: Any, current: Pass, call: ModuleCall) -> Iterator[Saved]:
        name = node.name()
        if name in SAVES_NOTHING:
            return
        if name == IN_PLACE_ON_VIEW and prod(node._input_metadata[0].shape) >= self._min_numel:
            self.in_place_on_views.add(call.path)
        if name == REENTRANT and self.checkpoints.reports_inputs:
            inputs = self.checkpoints.reentrant_inputs(node, current, call) if current.saves is None else ()
            yield from (saved for saved in inputs if self._report_input(saved))
            return
        name = getattr(node, "stands_for", (name,))[0]
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if not (node._raw_saved_tensors if is_custom else attributes(name, type(node), False)):
            return
        row = row_of(name)
        call.counts[row.op] = call.counts.get(row.op, 0) + 1
        for named in saved_of(node, name, self._min_numel > 0):
            saved = self._report_saved(node, row, named, current, call)
            if saved is not None:
                yield saved

    def _report_saved(self, node: Any, row: OperationRow, named: Named, current: Pass, call: ModuleCall) -> Saved | None:
        """Report a tensor that a node saved and return its description; None if it is too small or left out.

        `row`: the node's operation in the table of operations. `named`: what `saved_of` returned for the tensor.
        """
        is_large = named[2] is None or named[2].numel() >= self._min_numel
        if not is_large and not self.collects_small:
            return None
        saved = describe(node, row, named, current, call)
        if current.saves is not None and self.collects_small:
            self.checkpoints.in_second_passes.add(saved.name)
        if not is_large:
            self._collect_small(saved)
        if not is_large or self._is_left_out(saved):
            return None
        (current.saves or self._on_saved)(saved)
        if saved.tensor is None and self.checkpoints.on_recomputation is not None and current.in_checkpoint:
            current.hooked.append(saved)
        return saved

    def _collect_small(self, saved: Saved) -> None:
        if saved.kind == "activation":
            self.small.add(saved.name)

    def _is_left_out(self, saved: Saved) -> bool:
        return saved.name in self._left_out and saved.tensor is not None and packable_bytes(saved.tensor) <= self._max_left_bytes

    def _report_input(self, saved: Saved) -> bool:
        """Report a saved input of a checkpoint; return False if it is too small to be packed."""
        assert saved.tensor is not None
        if saved.tensor.numel() < self._min_numel:
            if self.collects_small:
                self._collect_small(saved)
            return False
        with torch.no_grad():
            self._on_saved(saved)
        return True
