"""`Optimizer` is a torch.optim.Optimizer for any update rule, which stores its tensors in low-bit formats.

    backward   a hook processes each complete gradient and frees it (gradient_hooks.py)
    step       one launch for all parameters with the same layout: decode, rule, encode (batched_update.py)

Which hook a parameter gets (`hook_of`):

    release                       Releaser: the parameter is updated inside backward
    a format for gradients        Accumulator: the gradient is added to a packed accumulator
    microbatches, no format       GradientMean: the gradient is multiplied by 1 / K
    small and sharded             GradientCopy: the gradient is copied out of the memory that it shares with others
    otherwise                     none: p.grad is read at the step

Groups, closures, schedulers, hooks and `state` are those of torch. If nothing of a parameter is packed (tier "full"), torch.optim
itself updates it. With `microbatches` = K, `step()` and `zero_grad()` do nothing until K backward passes were added, and the gradient is
their mean. An optimizer without state that was made before `paredown.apply` takes over the formats of the plan (`follow_requests`).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paredown.errors import OptimError
from paredown.formats.format import Format
from paredown.formats.rounding import Seed
from paredown.optim import state_dict as checkpoint
from paredown.optim.batched_update import update_one
from paredown.optim.diagnostics import Diagnostics, UpdateCounters
from paredown.optim.gradient_hooks import Accumulator, GradientCopy, GradientMean, Releaser, clear_factors
from paredown.optim.gradient_ops import PackedGradient
from paredown.optim.packed_weight import weight_of
from paredown.optim.parameter_state import (
    FROM_TIER,
    ParameterState,
    RequestedFormats,
    SlotFormats,
    check_gradient,
    check_group,
    check_parameter,
    choose,
    fill_state,
    remove_owner,
    request_of,
    restart,
    set_owner,
    unit_of,
    zeros,
)
from paredown.optim.rules import RULES, Rule
from paredown.optim.sharded.local_rows import local
from paredown.optim.step_batches import StepBatches
from paredown.roles import OF_PARAMETER, Role

RESTARTED = (
    "its gradient was cleared between microbatches ({} of {} were added up), and the others would be lost. Call opt.zero_grad(), which "
    "does nothing between microbatches, instead of model.zero_grad() or p.grad = None."
)
GRADIENT_ID = 3  # offset of the tensor id for the random bits of an accumulator; `reference.py` uses 0 to 2


def hook_of(optimizer: Optimizer, entry: ParameterState) -> Accumulator | GradientCopy | GradientMean | Releaser | None:
    """Return the hook that processes a parameter's gradient inside backward; None if `step()` reads p.grad instead."""
    parameter = entry.parameter
    if optimizer.memory.release:
        return _releaser(optimizer, entry)
    if entry.choices.format(Role.GRADIENT) is not None and not is_averaged_later(parameter):
        return _accumulator(optimizer, entry)
    if optimizer.microbatches > 1 and not isinstance(parameter, DTensor):
        start = _weakly(Optimizer._start_sum, optimizer, entry)
        return GradientMean(parameter, 1.0 / optimizer.microbatches, start, name=entry.name)
    return GradientCopy(parameter, entry.name) if isinstance(parameter, DTensor) and entry.choices.is_small else None


def is_averaged_later(parameter: Tensor) -> bool:
    """Return whether processes average the gradient only after its hook has run, as under DistributedDataParallel."""
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return is_distributed and not isinstance(parameter, DTensor)


def _accumulator(optimizer: Optimizer, entry: ParameterState) -> Accumulator:
    p, format = entry.parameter, entry.choices.format(Role.GRADIENT)
    assert format is not None
    seed = Seed(optimizer.seed, 8 * entry.number + GRADIENT_ID, first_index=entry.first_index)
    packed = zeros(local(p).shape, format, p.dtype, p.device)
    entry.gradient = gradient = PackedGradient(packed, seed, weight=1.0 / optimizer.microbatches)  # type: ignore[call-overload]
    gradient.total.rounding = entry.choices.rounding(Role.GRADIENT)
    gradient.total.before_start = _weakly(Optimizer._start_sum, optimizer, entry)
    gradient.total.before_unscale = _weakly(Optimizer._before_unscale, optimizer, entry)
    return Accumulator(p, gradient, name=entry.name)


def _releaser(optimizer: Optimizer, entry: ParameterState) -> Releaser:
    if is_averaged_later(entry.parameter):
        raise OptimError(
            "release=True updates before gradients were averaged over processes. Under DistributedDataParallel leave release out; "
            "use fully_shard (FSDP2) for large models."
        )
    update = _weakly(Optimizer._update_in_backward, optimizer, entry)
    return Releaser(entry.parameter, update, _weakly(lambda _, entry: entry.updated, optimizer, entry), name=entry.name)


def _weakly(function: Callable[..., Any], optimizer: Optimizer, entry: ParameterState) -> Callable[..., Any]:
    """Return a function that calls `function(optimizer, entry, ...)`, or returns None once one of the two was deleted."""
    optimizer_ref, entry_ref = weakref.ref(optimizer), weakref.ref(entry)

    def call(*args: Any) -> Any:
        optimizer, entry = optimizer_ref(), entry_ref()
        return function(optimizer, entry, *args) if optimizer is not None and entry is not None else None

    return call


# --- the driver -------------------------------------------------------------------------------------------------------

PARTIAL = (
    "GradScaler unscales gradients at every scaler.step(opt), but the sum over microbatches is not complete: call scaler.step(opt) and "
    "scaler.update() where opt.updates_next is true, and opt.step() elsewhere."
)
NOT_PACKED = ("amsgrad", "differentiable", "capturable")  # options of torch.optim that only unmodified parameters support


@dataclass(frozen=True)
class MemoryOptions:
    """The arguments that optimizers have beyond those of torch.optim; `optimizers.py` explains each."""

    tier: str | None = None
    weight: Any = FROM_TIER
    residue: Any = FROM_TIER
    moment1: Any = FROM_TIER
    moment2: Any = FROM_TIER
    gradient: Any = FROM_TIER
    rounding: Mapping[str, str] | None = None
    release: bool = False
    microbatches: int = 1
    seed: int = 0

    def defaults(self) -> dict[str, Any]:
        """Return the default options of a parameter group: tier, formats and roundings, each of which a group may override."""
        texts = {role.value: getattr(self, role.value) for role in OF_PARAMETER}
        formats = {name: value if value is None else str(value) for name, value in texts.items()}
        return {"tier": self.tier, **formats, "rounding": self.rounding}


class Optimizer(torch.optim.Optimizer, ABC):
    """The base class of SGD, AdamW, Lion and Muon: a torch.optim.Optimizer that stores its tensors in low-bit formats.

    Subclasses define the update rule, its hyperparameters, and the torch.optim class for unpacked parameters.
    """

    rule_name: str
    # makes the torch.optim optimizer for parameters of which nothing is packed; None: torch has none for this rule
    torch_class: Callable[[list[dict[str, Any]]], Any] | None

    def __init__(self, params: Any, defaults: dict[str, Any], memory: MemoryOptions) -> None:
        if not isinstance(memory.microbatches, int) or memory.microbatches < 1:
            raise OptimError(f"microbatches={memory.microbatches!r}: give an integer of at least 1.")
        if memory.release and memory.microbatches > 1:
            raise OptimError(
                f"release=True updates in every backward pass and stores no gradient; microbatches={memory.microbatches} sums gradients. "
                "Choose one of the two."
            )
        self.memory, self.microbatches, self.seed = memory, memory.microbatches, memory.seed
        self.rule: Rule = RULES[self.rule_name]
        self.updates = 0  # number of step() calls that changed the parameters
        self._num_accumulated = 0  # microbatches since the last update
        self._is_unscaled = False  # whether a GradScaler has unscaled gradients since the last step
        self._entries: list[ParameterState] = []
        self._by_id: dict[int, ParameterState] = {}
        self._counts = UpdateCounters()
        self._torch: Any = None  # the optimizer that `torch_class` made
        self._full: list[ParameterState] | None = None  # the parameters that `_torch` updates
        self._batches = StepBatches(self)
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove_all, self._hooks)  # after the optimizer is deleted, gradients are ordinary tensors
        super().__init__(params, {**defaults, **memory.defaults()})

    # --- defined by a final class ------------------------------------------------------------------------------------------

    @abstractmethod
    def numbers(self, group: Mapping[str, Any], step: int, factor: float) -> Mapping[str, float]:
        """Return the update rule's hyperparameters at `step`, counted from 1, by their names in `rules.py`.

        `group` is a parameter group; `factor` multiplies the gradients.
        """

    @abstractmethod
    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a hyperparameter of the group is out of range."""

    def rule_for(self, group: Mapping[str, Any]) -> Rule:
        """Return the update rule of a parameter group; the rule of SGD depends on the group's momentum."""
        return self.rule

    def hyper(self, group: Mapping[str, Any], step: int, factor: float) -> tuple[float, ...]:
        """Return the hyperparameters of a group at `step` (from 1) in the order of the rule's `hyper_names`.

        `factor` multiplies the gradients.
        """
        numbers = self.numbers(group, step, factor)
        return tuple(numbers[name] for name in self.rule_for(group).hyper_names)

    # --- groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch.optim does; it may have its own tier (a named set of formats) and roundings."""
        super().add_param_group(param_group)
        group, index, num_before = self.param_groups[-1], len(self.param_groups) - 1, len(self._entries)
        try:
            check_group(group)
            self.check_hyper(group)
            names = group.get("param_names") or []
            for i, parameter in enumerate(group["params"]):
                name = names[i] if i < len(names) else f"parameter {i} of group {index}"
                check_parameter(parameter, name)
                self._add_parameter(parameter, index, name)
        except Exception:
            self.param_groups.pop()
            self._remove_entries(num_before)
            raise
        self._torch, self._full = None, None
        self._batches.clear()

    def _remove_entries(self, num_entries: int) -> None:
        """Remove all parameters but the first `num_entries`, after `add_param_group` has failed."""
        for entry in self._entries[num_entries:]:
            self._by_id.pop(id(entry.parameter), None)
            remove_owner(entry.parameter, self)
            if entry.hook is not None:
                entry.hook.remove()
        del self._entries[num_entries:]
        self._counts.keep(num_entries)

    def _add_parameter(self, parameter: Tensor, index: int, name: str) -> None:
        request = request_of(parameter)
        choices = choose(parameter, self.param_groups[index], request, name)
        entry = ParameterState(parameter, index, len(self._entries), choices, self._counts.add(local(parameter).device))
        check_weight(parameter, choices, entry.weight.packed.format if entry.weight is not None else None, request)
        self._check_options(index, choices)
        set_owner(parameter, self)
        self._entries.append(entry)
        self._by_id[id(parameter)] = entry
        self._attach_hook(entry)

    def _attach_hook(self, entry: ParameterState) -> None:
        entry.hook = hook_of(self, entry)
        if entry.hook is not None:
            entry.hook.attach()
            self._hooks.append(entry.hook)

    def _check_options(self, index: int, choices: SlotFormats) -> None:
        """Raise OptimError if parameter group `index` has an option of torch.optim that only unpacked parameters support."""
        requested = [name for name in NOT_PACKED if self.param_groups[index].get(name)]
        if requested and not self._is_full(choices):
            raise OptimError(
                f"{requested[0]}=True has no packed form ({choices.name}): leave it out, or give that group tier='full'."
            )

    # --- a plan that is applied after the optimizer was made --------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        """Whether there are moments or sums of gradients, so that a change of their formats would need a conversion."""
        return bool(self.updates or self._num_accumulated or any(entry.step for entry in self._entries) or any(self.state.values()))

    def check_request(self, parameter: Tensor, request: RequestedFormats) -> None:
        """Raise OptimError if `parameter`, its gradient and its moments cannot be stored in the formats that a plan requests."""
        entry = self._by_id[id(parameter)]
        choices = choose(parameter, self.param_groups[entry.group], request, entry.name)
        packed_format = None if choices.is_small else request.choices[Role.WEIGHT][0]  # the format that the session will pack it in
        check_weight(parameter, choices, packed_format, request)
        self._check_options(entry.group, choices)

    def follow_requests(self) -> None:
        """Choose the formats of all parameters again, and use them from now on, since a plan was applied after the first choice."""
        for entry in self._entries:
            p = entry.parameter
            choices = choose(p, self.param_groups[entry.group], request_of(p), entry.name)
            if choices == entry.choices and weight_of(p) is entry.weight:
                continue
            if entry.hook is not None:
                entry.hook.remove()
            entry.choices, entry.weight = choices, weight_of(p)
            entry.gradient, entry.shadow, entry.unit = None, None, None
            self._attach_hook(entry)
        self._torch, self._full = None, None
        self._batches.clear()

    def let_go(self, parameter: Tensor) -> None:
        """Stop processing a parameter's gradients, since a newer optimizer updates the parameter: remove its hook."""
        entry = self._by_id.get(id(parameter))
        if entry is not None and entry.hook is not None:
            self._batches.clear()
            entry.hook.remove()
            entry.hook, entry.is_gone = None, True

    # --- steps ------------------------------------------------------------------------------------------------------------

    @property
    def updates_next(self) -> bool:
        """Whether the next `step()` changes parameters, as every `microbatches`-th does; clip gradients only before such a step."""
        return self._num_accumulated + 1 >= self.microbatches

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have gradients; with `microbatches` = K, every K-th call does, and others do nothing."""
        if torch.is_inference_mode_enabled():
            raise OptimError(
                "step() inside torch.inference_mode() would make parameters that cannot be trained: leave that context first."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.updates_next:
            self._num_accumulated, self._is_unscaled = self._num_accumulated + 1, False
            return loss
        with torch.no_grad():
            if self.memory.release:
                for entry in self._entries:
                    entry.updated = False
            else:
                self._batches.run()
                self._step_torch()
        self._finish_sums()
        self.updates += 1
        self._counts.after(self.updates, self._entries)
        return loss

    def _finish_sums(self) -> None:
        """Mark the sums over microbatches as used, so that the next gradient of each parameter starts a new sum."""
        self._num_accumulated, self._is_unscaled = 0, False
        if self.microbatches > 1:
            for entry in self._entries:
                entry.is_started = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as in torch.optim; between the microbatches of one update it does nothing."""
        if self._is_unscaled:  # a GradScaler skipped the step of a complete sum, since it was not finite
            self._finish_sums()
        if self._num_accumulated == 0:
            with torch._C.DisableTorchFunctionSubclass():
                super().zero_grad(set_to_none)
            clear_factors(entry.gradient for entry in self._entries if entry.gradient is not None)

    def drop_gradients(self) -> None:
        """Discard the gradients of all microbatches since the last update, so that the next `step()` changes no parameter."""
        self._finish_sums()
        self.zero_grad()
        self._num_accumulated = self.microbatches - 1

    def _start_sum(self, entry: ParameterState) -> None:
        """Mark that a new sum over microbatches starts; raise OptimError if user code has cleared an incomplete one."""
        if self.microbatches > 1:
            if self._num_accumulated and entry.is_started:
                raise OptimError(RESTARTED.format(self._num_accumulated, self.microbatches))
            entry.is_started = True

    def _before_unscale(self, entry: ParameterState) -> None:
        """Record that a GradScaler unscales gradients now; raise OptimError if microbatches of the sum are missing."""
        if not self.updates_next:
            raise OptimError(PARTIAL)
        self._is_unscaled = True

    def _update_in_backward(self, entry: ParameterState, grad: Tensor) -> None:
        """Update one parameter with its gradient `grad` inside backward, as `release=True` requests."""
        group, plain = self.param_groups[entry.group], local(entry.parameter)
        rule = self.rule_for(group)
        with torch.no_grad():
            check_gradient(entry, grad)
            entry.weight = weight_of(entry.parameter)
            if entry.weight is not None and entry.weight.address:  # decoded at the moment: other code may have written to it
                entry.weight.gather()
                entry.weight = weight_of(entry.parameter)
            memory = (rule.name, entry.weight.packed if entry.weight is not None else plain.data_ptr())
            if entry.unit is None or entry.unit[0] != memory or entry.unit[1] is not self.state[entry.parameter]:
                check_parameter(entry.parameter, entry.name)
                restart(entry, rule, self.state[entry.parameter])
                fill_state(entry, rule, self.state[entry.parameter])
                entry.unit = memory, self.state[entry.parameter], unit_of(entry, rule, self.state[entry.parameter], grad)
            hyper = self.hyper(group, entry.step + 1, -1.0 if group.get("maximize") else 1.0)
            if entry.shadow is not None:
                entry.shadow.copy_(plain)
            update_one(rule, entry.unit[2], hyper, entry.step + 1, self.seed, local(grad).contiguous())
            if entry.shadow is not None:
                plain.copy_(entry.shadow)
            if entry.weight is not None:
                entry.weight.changed()
        entry.step += 1
        entry.updated = True

    def _step_torch(self) -> None:
        """Update the parameters of which nothing is packed by an optimizer of torch.optim with the same hyperparameters."""
        if self._full is None:
            self._full = [entry for entry in self._entries if self.is_torchs(entry)]
        full = self._full
        if not full:
            return
        if self._torch is None:
            groups = [{"params": [e.parameter for e in full if e.group == i]} for i in range(len(self.param_groups))]
            assert self.torch_class is not None
            self._torch = self.torch_class([{**self._torch_options(i), **group} for i, group in enumerate(groups)])
        self._torch.state = self.state
        for i, group in enumerate(self._torch.param_groups):
            group.update(self._torch_options(i))
        for entry in full if self.microbatches > 1 else ():
            if isinstance(entry.parameter, DTensor) and entry.parameter.grad is not None:
                entry.parameter.grad.div_(self.microbatches)  # other gradients are means already
        self._torch.step()

    def _torch_options(self, index: int) -> dict[str, Any]:
        ours = {*self.memory.defaults(), "params", "param_names", "initial_lr"}
        return {name: value for name, value in self.param_groups[index].items() if name not in ours}

    def is_torchs(self, entry: ParameterState) -> bool:
        """Return whether torch.optim updates this parameter: neither weight, moments nor gradient are packed."""
        return self._is_full(entry.choices)

    def _is_full(self, choices: SlotFormats) -> bool:
        return choices.is_full and not self.memory.release and self.torch_class is not None

    # --- inspection -------------------------------------------------------------------------------------------------------

    def diagnostics(self, *, reset: bool = False) -> Diagnostics:
        """Return, for each packed parameter, how many updates rounding has lost since the start, or since the last reset."""
        return self._counts.diagnostics(self._entries, reset=reset)

    @property
    def entries(self) -> Sequence[ParameterState]:
        """The state of each parameter, in the order of the parameter groups."""
        return self._entries

    def entry_of(self, parameter: Tensor) -> ParameterState | None:
        """Return this optimizer's state of a parameter; None if it does not update that parameter."""
        return self._by_id.get(id(parameter))

    # --- checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, packed as it is stored, so that a training that loads it continues with the same bits."""
        self._batches.settle()
        return checkpoint.state_dict(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict()`, or load and pack the state of a torch.optim or bitsandbytes optimizer."""
        self._batches.clear()
        checkpoint.load_state_dict(self, state_dict, super().load_state_dict)
        self._torch = None

    def export_state(self) -> dict[str, Any]:
        """Return the state decoded to float32, in the form that the torch.optim optimizer of the same name loads."""
        self._batches.settle()
        return checkpoint.export_state(self)

    def __getstate__(self) -> dict[str, Any]:
        raise OptimError(
            f"{type(self).__name__} has hooks on its parameters and cannot be pickled or copied. Save opt.state_dict(), and load it into "
            "an optimizer of the other parameters."
        )


def _remove_all(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def check_weight(parameter: Tensor, choices: SlotFormats, packed_format: Format | None, request: RequestedFormats | None) -> None:
    """Raise OptimError if an optimizer cannot store the weight `parameter` in the format that `choices` has for it.

    `packed_format`: the format in which a session has packed the weight, or will pack it; None without one. `request`: the plan's formats.
    """
    format, dtype = choices.format(Role.WEIGHT), parameter.dtype
    if format is None or choices.is_small or (isinstance(parameter, DTensor) and packed_format is None):
        return
    if packed_format is not None and packed_format != format:
        raise OptimError(
            f"{choices.name} is stored in {packed_format} by the session's plan, and the optimizer requests {format}. Apply a plan "
            f"with weight='{format}', or leave weight= and tier= to the plan."
        )
    if request is not None and request.choices[Role.WEIGHT][0] == format:
        return  # packed by the session, or left unpacked for a reason that session.changes reports
    if packed_format is None and not (str(format) == "bf16" and dtype is torch.bfloat16):
        raise OptimError(
            f"weight='{format}' for {choices.name} ({str(dtype).removeprefix('torch.')}) needs the model, not its parameters alone: call "
            f"paredown.apply(paredown.Plan.uniform(weight='{format}'), model) first. Or give weight=None: weights then stay unmodified, "
            "and moments and gradients are packed."
        )
