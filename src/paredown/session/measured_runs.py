"""`MeasuredRuns` lets `verify` run a session's steps without the plan, packed in float32, or partly packed.

with session.runs.restored() as rewind:          # afterwards decisions and counts are what they were
    with session.runs.unmodified(): ...           # nothing is packed, no module is checkpointed, weights are decoded
    rewind()                                      # the next pass draws the same random bits
    with session.runs.storing(["body.0:input"], is_exact=True): ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import final

import torch

from paredown.autograd.graph import Saved
from paredown.autograd.module_watch import Watch
from paredown.optim.packed_weight import Weight
from paredown.session.checkpointing import CheckpointedModules
from paredown.session.eager.activations import Activations, Observer
from paredown.session.eager.slot_decisions import StorageDecision
from paredown.session.tiles import TiledModules
from paredown.session.weights.packed_weights import Weights


@final
class MeasuredRuns:
    """Provides contexts in which `verify` runs a model: without the plan, packed in float32, or partly packed."""

    def __init__(
        self, activations: Activations, watch: Watch, weights: Weights, checkpointed: CheckpointedModules, tiles: TiledModules
    ) -> None:
        self._activations, self._watch, self._weights, self._checkpointed = activations, watch, weights, checkpointed
        self._tiles = tiles

    @property
    def packed_weights(self) -> Mapping[str, Weight]:
        """Return the packed weights, by the names of their parameters."""
        return self._weights.weights

    def decision_of(self, name: str) -> StorageDecision | None:
        """Return how the saved tensor with the slot name `name` is stored; None if no forward pass has saved it yet."""
        return self._activations.decisions.get(name)

    @contextmanager
    def unmodified(self) -> Generator[None]:
        """Return a context in which the model runs without the plan, with packed weights decoded."""
        layers = self._checkpointed.paused(), self._tiles.paused()
        with self._watch.paused(), layers[0], layers[1], self._weights.unpacked(), self._weights.keeping_saved():
            yield

    @contextmanager
    def storing(
        self, only: Collection[str] | None = None, *, is_exact: bool = False, on_packed: Observer | None = None
    ) -> Generator[None]:
        """Return a context in which only tensors named in `only` (None: all) are packed; in float32 if `is_exact`.

        `on_packed` is called after each saved tensor is packed.
        """
        activations = self._activations
        chosen, save = None if only is None else frozenset(only), activations.save

        def save_chosen(saved: Saved) -> None:
            if chosen is not None and saved.name in chosen:
                save(saved)

        with ExitStack() as stack:
            if chosen is not None:
                stack.enter_context(self._watch.reporting_to(save_chosen))
            if is_exact:
                stack.enter_context(activations.storing_exactly())
            if on_packed is not None:
                stack.enter_context(activations.observed_by(on_packed))
            yield

    @contextmanager
    def restored(self) -> Generator[Callable[[], None]]:
        """Return a context that restores storage decisions and the number of forward passes at its end.

        No guard measures in it. It yields a function that resets the number at once, so that the next pass draws the same random bits.
        """
        with self._activations.restored_after() as rewind:
            try:
                yield rewind
            finally:
                torch.clear_autocast_cache()
