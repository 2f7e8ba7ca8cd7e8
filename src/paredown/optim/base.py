"""Any rule on any formats: a torch.optim.Optimizer whose parameters, moments and gradient accumulators wait in low precision.

    backward   a complete gradient is folded into its packed accumulator and freed (gradient_hooks.py), or used at once (release)
    step       one launch over all parameters alike: decode, rule, encode (batched_update.py)

Groups, closures, schedulers, hooks and `state` are torch's. A parameter for which nothing is packed (tier "full") is updated by torch.optim
itself. With `microbatches` = K, `step()` and `zero_grad()` wait until K backward passes were folded, and the gradient is their mean.

How gradients reach an optimizer: which hook a parameter gets, and what is refused on the way.

release                    used in backward, at once            (Releaser)
a format for gradients     folded into a packed accumulator     (Accumulator)
microbatches, plain        multiplied by 1 / K as they come     (Mean)
otherwise                  torch's p.grad, read at the step
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
from paredown.optim.gradient_hooks import Accumulator, GradientMean, PackedGradient, Releaser, clear_factors
from paredown.optim.packed_weight import weight_of
from paredown.optim.parameter_state import (
    FROM_TIER,
    SLOTS,
    ParameterState,
    RequestedFormats,
    SlotFormats,
    check_gradient,
    check_group,
    check_parameter,
    choose,
    fill_state,
    local,
    remove_owner,
    request_of,
    restart,
    set_owner,
    unit_of,
    zeros,
)
from paredown.optim.rules import RULES, Rule
from paredown.optim.step_batches import StepBatches
from paredown.roles import Role

RESTARTED = (
    "its gradient was cleared between microbatches ({} of {} were added up), and the others would be lost. Call opt.zero_grad(), which "
    "waits for all of them, in the place of model.zero_grad() or p.grad = None."
)
GRADIENT_ID = 3  # of the random bits of an accumulator: see `reference.py`


def hook_of(optimizer: Optimizer, entry: ParameterState) -> Accumulator | GradientMean | Releaser | None:
    """The hook that takes the gradients of a parameter, not yet attached."""
    parameter = entry.parameter
    if optimizer.memory.release:
        return _releaser(optimizer, entry)
    if entry.choices.format(Role.GRADIENT) is not None and not is_averaged_later(parameter) and not isinstance(parameter, DTensor):
        return _accumulator(optimizer, entry)
    if optimizer.microbatches > 1 and not isinstance(parameter, DTensor):
        return GradientMean(parameter, 1.0 / optimizer.microbatches, _start_of(optimizer, entry), name=entry.name)
    return None


def is_averaged_later(parameter: Tensor) -> bool:
    """Whether processes average this gradient after backward has it, as under DDP."""
    spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return spread and not isinstance(parameter, DTensor)


def _accumulator(optimizer: Optimizer, entry: ParameterState) -> Accumulator:
    p, format = entry.parameter, entry.choices.format(Role.GRADIENT)
    assert format is not None
    seed = Seed(optimizer.seed, 8 * entry.number + GRADIENT_ID)
    packed = zeros(p.shape, format, p.dtype, p.device)
    entry.gradient = gradient = PackedGradient(packed, seed, weight=1.0 / optimizer.microbatches)  # type: ignore[call-overload]
    me = weakref.ref(optimizer)
    gradient.total.rounding = entry.choices.rounding(Role.GRADIENT)
    gradient.total.before_start = _start_of(optimizer, entry)
    gradient.total.before_unscale = lambda: o._before_unscale() if (o := me()) is not None else None
    return Accumulator(p, gradient, name=entry.name)


def _releaser(optimizer: Optimizer, entry: ParameterState) -> Releaser:
    if is_averaged_later(entry.parameter):
        raise OptimError(
            "release=True updates before gradients were averaged over processes. Under DistributedDataParallel leave release out; "
            "fully_shard (FSDP2) is the way at scale."
        )
    me, mine = weakref.ref(optimizer), weakref.ref(entry)

    def update(grad: Tensor) -> None:
        optimizer, entry = me(), mine()
        if optimizer is not None and entry is not None:
            optimizer._update_at_once(entry, grad)

    return Releaser(entry.parameter, update, lambda: (e := mine()) is not None and e.updated, name=entry.name)


def _start_of(optimizer: Optimizer, entry: ParameterState) -> Callable[[], None]:
    """What is called before a sum of gradients begins: with microbatches it begins once for each update."""
    me, mine = weakref.ref(optimizer), weakref.ref(entry)

    def start() -> None:
        optimizer, entry = me(), mine()
        if optimizer is not None and entry is not None and optimizer.microbatches > 1:
            if optimizer._waiting and entry.is_started:
                raise OptimError(RESTARTED.format(optimizer._waiting, optimizer.microbatches))
            entry.is_started = True

    return start


# --- Any rule on any formats ---

PARTIAL = (
    "GradScaler unscales gradients at every scaler.step(opt), and more microbatches are to come before the step: call scaler.step(opt) and "
    "scaler.update() where opt.updates_next is true, and opt.step() elsewhere."
)
NOT_PACKED = ("amsgrad", "differentiable", "capturable")  # of torch.optim, for parameters that stay as they are


@dataclass(frozen=True)
class MemoryOptions:
    """How an optimizer keeps its tensors: the arguments that torch.optim does not have."""

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
        """What a group may have of its own."""
        texts = {role.value: getattr(self, role.value) for role in SLOTS}
        formats = {name: value if value is None else str(value) for name, value in texts.items()}
        return {"tier": self.tier, **formats, "rounding": self.rounding}


class Optimizer(torch.optim.Optimizer, ABC):
    """The driver. A final class gives the rule, its hyperparameters, and torch's own optimizer for tier "full"."""

    rule_name: str

    def __init__(self, params: Any, defaults: dict[str, Any], memory: MemoryOptions) -> None:
        if not isinstance(memory.microbatches, int) or memory.microbatches < 1:
            raise OptimError(f"microbatches={memory.microbatches!r}: give a whole number, at least 1.")
        if memory.release and memory.microbatches > 1:
            raise OptimError(
                f"release=True updates in every backward pass and keeps no gradient; microbatches={memory.microbatches} adds gradients up. "
                "Choose one of the two."
            )
        self.memory, self.microbatches, self.seed = memory, memory.microbatches, memory.seed
        self.rule: Rule = RULES[self.rule_name]
        self.updates = 0  # how often step() changed the parameters
        self._waiting = 0  # backward passes since then
        self._is_unscaled = False  # by a GradScaler, since the last step
        self._entries: list[ParameterState] = []
        self._by_id: dict[int, ParameterState] = {}
        self._counts = UpdateCounters()
        self._torch: torch.optim.Optimizer | None = None
        self._full: list[ParameterState] | None = None  # what it updates
        self._rounds = StepBatches(self)
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove_all, self._hooks)  # without an optimizer gradients are torch's again
        super().__init__(params, {**defaults, **memory.defaults()})

    # --- what a final class says ------------------------------------------------------------------------------------------

    @abstractmethod
    def hyper(self, group: Mapping[str, Any], step: int, factor: float) -> tuple[float, ...]:
        """The numbers that the rule reads at a step (from 1), in the order of its `hyper_names`; `factor` multiplies gradients."""

    @abstractmethod
    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Refuse impossible hyperparameters."""

    @abstractmethod
    def make_torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """torch's own optimizer for parameters that stay as they are; None where torch has none."""

    def rule_for(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a group: SGD without momentum has another one."""
        return self.rule

    # --- groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; tier, formats and roundings may be given for the group."""
        super().add_param_group(param_group)
        group, index, num_before = self.param_groups[-1], len(self.param_groups) - 1, len(self._entries)
        try:
            check_group(group)
            self.check_hyper(group)
            names = group.get("param_names") or []
            for i, parameter in enumerate(group["params"]):
                place = names[i] if i < len(names) else f"parameter {i} of group {index}"
                check_parameter(parameter, place)
                self._admit(parameter, index, place)
        except Exception:
            self.param_groups.pop()
            self._dismiss(num_before)
            raise
        self._torch, self._full = None, None
        self._rounds.forget()

    def _dismiss(self, num_kept: int) -> None:
        """Forget the entries of a group that was refused."""
        for entry in self._entries[num_kept:]:
            self._by_id.pop(id(entry.parameter), None)
            remove_owner(entry.parameter, self)
            if entry.hook is not None:
                entry.hook.remove()
        del self._entries[num_kept:]
        self._counts.keep(num_kept)

    def _admit(self, parameter: Tensor, index: int, place: str) -> None:
        request = request_of(parameter)
        choices = choose(parameter, self.param_groups[index], request, place)
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
        """Raise OptimError for options of torch.optim that packed state does not support."""
        requested = [name for name in NOT_PACKED if self.param_groups[index].get(name)]
        if requested and not self._is_full(choices):
            raise OptimError(
                f"{requested[0]}=True has no packed form ({choices.name}): leave it out, or give that group tier='full'."
            )

    # --- a plan that is applied after the optimizer was made --------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        """Whether there is state, or a sum of gradients, that new formats would have to be converted from."""
        return bool(self.updates or self._waiting or any(entry.step for entry in self._entries) or any(self.state.values()))

    def check_request(self, parameter: Tensor, request: RequestedFormats) -> None:
        """Raise OptimError if this optimizer cannot store `parameter` and its state as `request` says; changes nothing."""
        entry = self._by_id[id(parameter)]
        choices = choose(parameter, self.param_groups[entry.group], request, entry.name)
        packed_format = None if choices.is_small else request.choices[Role.WEIGHT][0]  # the session will pack it in this
        check_weight(parameter, choices, packed_format, request)
        self._check_options(entry.group, choices)

    def follow_request(self, parameter: Tensor) -> None:
        """Take the formats that the plan of a session gives to `parameter`, as if the optimizer had been made after `apply`."""
        entry = self._by_id[id(parameter)]
        if entry.hook is not None:
            entry.hook.remove()
        entry.choices = choose(parameter, self.param_groups[entry.group], request_of(parameter), entry.name)
        entry.weight, entry.gradient, entry.shadow, entry.unit = weight_of(parameter), None, None, None
        self._attach_hook(entry)
        self._torch, self._full = None, None
        self._rounds.forget()

    def let_go(self, parameter: Tensor) -> None:
        """Another optimizer takes this parameter over: its gradients are no longer folded here."""
        entry = self._by_id.get(id(parameter))
        if entry is not None and entry.hook is not None:
            self._rounds.forget()
            entry.hook.remove()
            entry.hook, entry.is_gone = None, True

    # --- steps ------------------------------------------------------------------------------------------------------------

    @property
    def updates_next(self) -> bool:
        """Whether the next `step()` changes parameters: with microbatches, clip gradients then alone."""
        return self._waiting + 1 >= self.microbatches

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have gradients; with microbatches, at every K-th call."""
        if torch.is_inference_mode_enabled():
            raise OptimError(
                "step() inside torch.inference_mode() would make parameters that cannot be trained: leave that context first."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.updates_next:
            self._waiting, self._is_unscaled = self._waiting + 1, False
            return loss
        with torch.no_grad():
            if self.memory.release:
                for entry in self._entries:
                    entry.updated = False
            else:
                self._rounds.run()
                self._step_torch()
        self._end_of_sums()
        self.updates += 1
        self._counts.after(self.updates, self._entries)
        return loss

    def _end_of_sums(self) -> None:
        """The next gradient begins a new sum."""
        self._waiting, self._is_unscaled = 0, False
        if self.microbatches > 1:
            for entry in self._entries:
                entry.is_started = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; between microbatches it does nothing."""
        if self._is_unscaled:  # a GradScaler saw all of it, and left the step out: it was not finite
            self._end_of_sums()
        if self._waiting == 0:
            with torch._C.DisableTorchFunctionSubclass():
                super().zero_grad(set_to_none)
            clear_factors(entry.gradient for entry in self._entries if entry.gradient is not None)

    def drop_gradients(self) -> None:
        """Forget all gradients: the `step()` that follows changes nothing, with microbatches too."""
        self._end_of_sums()
        self.zero_grad()
        self._waiting = self.microbatches - 1

    def _before_unscale(self) -> None:
        """A GradScaler is about to unscale accumulators."""
        if not self.updates_next:
            raise OptimError(PARTIAL)
        self._is_unscaled = True

    def _update_at_once(self, entry: ParameterState, grad: Tensor) -> None:
        """Under release: the update of one parameter, inside backward."""
        group, mine = self.param_groups[entry.group], local(entry.parameter)
        rule = self.rule_for(group)
        with torch.no_grad():
            check_gradient(entry, grad)
            entry.weight = weight_of(entry.parameter)
            if entry.weight is not None and entry.weight.address:  # somebody uses it, and may have written into it
                entry.weight.gather()
                entry.weight = weight_of(entry.parameter)
            memory = (rule.name, entry.weight.packed if entry.weight is not None else mine.data_ptr())
            if entry.unit is None or entry.unit[0] != memory or entry.unit[1] is not self.state[entry.parameter]:
                check_parameter(entry.parameter, entry.name)
                restart(entry, rule, self.state[entry.parameter])
                fill_state(entry, rule, self.state[entry.parameter])
                entry.unit = memory, self.state[entry.parameter], unit_of(entry, rule, self.state[entry.parameter], grad)
            hyper = self.hyper(group, entry.step + 1, -1.0 if group.get("maximize") else 1.0)
            if entry.shadow is not None:
                entry.shadow.copy_(mine)
            update_one(rule, entry.unit[2], hyper, entry.step + 1, self.seed, local(grad).contiguous())
            if entry.shadow is not None:
                mine.copy_(entry.shadow)
            if entry.weight is not None:
                entry.weight.changed()
        entry.step += 1
        entry.updated = True

    def _step_torch(self) -> None:
        """Parameters that stay as they are: torch's own optimizer, on the same state and hyperparameters."""
        if self._full is None:
            self._full = [entry for entry in self._entries if self.is_torchs(entry)]
        full = self._full
        if not full:
            return
        if self._torch is None:
            groups = [{"params": [e.parameter for e in full if e.group == i]} for i in range(len(self.param_groups))]
            made = self.make_torch([{**self._torch_options(i), **group} for i, group in enumerate(groups)])
            assert made is not None
            self._torch = made
        self._torch.state = self.state
        for i, group in enumerate(self._torch.param_groups):
            group.update(self._torch_options(i))
        for entry in full if self.microbatches > 1 else ():
            if isinstance(entry.parameter, DTensor) and entry.parameter.grad is not None:
                entry.parameter.grad.div_(self.microbatches)  # all others hold the mean already
        self._torch.step()

    def _torch_options(self, index: int) -> dict[str, Any]:
        ours = {*self.memory.defaults(), "params", "param_names", "initial_lr"}
        return {name: value for name, value in self.param_groups[index].items() if name not in ours}

    def is_torchs(self, entry: ParameterState) -> bool:
        """Whether torch's own optimizer serves this parameter."""
        return self._is_full(entry.choices)

    def _is_full(self, choices: SlotFormats) -> bool:
        return choices.is_full and not self.memory.release and self.has_torch

    has_torch = True  # whether torch.optim has an optimizer of this name

    # --- what is known ----------------------------------------------------------------------------------------------------

    def diagnostics(self, *, reset: bool = False) -> Diagnostics:
        """Underflow, flips and dead zone of each packed parameter, since the start or the last reset."""
        return self._counts.diagnostics(self._entries, reset=reset)

    @property
    def entries(self) -> Sequence[ParameterState]:
        """What each parameter has, in the order of the groups."""
        return self._entries

    def entry_of(self, parameter: Tensor) -> ParameterState | None:
        """What one parameter has."""
        return self._by_id.get(id(parameter))

    # --- checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, packed as it is: a run that loads it goes on with the same bits. The parameters' codes are in it."""
        self._rounds.settle()
        return checkpoint.state_dict(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict()` returned, or the state of torch.optim or bitsandbytes, which is encoded."""
        self._rounds.forget()
        checkpoint.load_state_dict(self, state_dict, super().load_state_dict)
        self._torch = None

    def export_state(self) -> dict[str, Any]:
        """The state as torch.optim's optimizer of the same name has it: decoded, to load there."""
        self._rounds.settle()
        return checkpoint.export_state(self)

    def __getstate__(self) -> dict[str, Any]:
        raise OptimError(
            f"{type(self).__name__} is tied to hooks on its parameters and cannot be pickled or copied. Save opt.state_dict(), and load it "
            "into an optimizer made for the other parameters."
        )


def _remove_all(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def check_weight(parameter: Tensor, choices: SlotFormats, packed_format: Format | None, request: RequestedFormats | None) -> None:
    """Raise OptimError for a weight format that the optimizer cannot provide; `packed_format` is that of the session's packed weight."""
    format, dtype = choices.format(Role.WEIGHT), parameter.dtype
    if format is None or choices.is_small or isinstance(parameter, DTensor):
        return
    if packed_format is not None and packed_format != format:
        raise OptimError(
            f"{choices.name} is stored in {packed_format} by the session's plan, and the optimizer asks for {format}. Apply a plan "
            f"with weight='{format}', or leave weight= and tier= to the plan."
        )
    if request is not None and request.choices[Role.WEIGHT][0] == format:
        return  # packed by the session, or left plain for a reason that session.changes reports
    if packed_format is None and not (str(format) == "bf16" and dtype is torch.bfloat16):
        raise OptimError(
            f"weight='{format}' for {choices.name} ({str(dtype).removeprefix('torch.')}) needs the model, not its parameters alone: call "
            f"paredown.apply(paredown.Plan.uniform(weight='{format}'), model) first. Or give weight=None: weights then stay unmodified, "
            "and moments and gradients are packed."
        )
