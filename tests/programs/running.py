"""Runs a random program: three steps, unmodified or under a session, and what came of it.

Between steps the parameters shrink by 1 %, whatever their gradients: the steps are judged one by one, and a distance does not grow.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paredown import Plan, apply
from tests.programs.compiling import compiled_model, compiles_quickly
from tests.programs.names import in_threads
from tests.programs.programs import Program

NUM_STEPS = 3
BLOCK = 64
INPUT, INNER, GRADIENT = 100, 200, 1 << 10  # places of values that are no line's


@dataclass
class Outcome:
    """Losses and gradients of all steps; what was still alive, or still in place, after the session was closed and all was dropped."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, by a name with the number of the step."""
        for step, (loss, gradients) in enumerate(zip(self.losses, self.gradients, strict=True)):
            yield f"step {step}: loss", loss
            for name, gradient in gradients.items():
                yield f"step {step}: {name}", gradient

    @property
    def is_sane(self) -> bool:
        """Whether all is finite and of no absurd size."""
        return all(bool(tensor.isfinite().all()) and float(tensor.abs().max()) < 1e6 for _, tensor in self.tensors())


@dataclass(frozen=True)
class Noise:
    """The size of a disturbance, as a share of a block's largest value; the seed of its random numbers; what is disturbed."""

    size: float = 0.0
    seed: int = 0
    is_in_values: bool = False  # every value and its gradient
    is_in_gradients: bool = False  # every gradient that backward passes from one node to another, and no value


NO_NOISE = Noise()


class Values:
    """Sees every value of a program: remembers the storages, and disturbs values and their gradients.

    The disturbance is that of rounding in blocks of 64: uniform, up to `Noise.size` times the largest of a block. Forward and backward both
    see that of a value, so the result is the gradient of a program whose values differ by that much; that of its gradient is what sums see
    whose parts cancel. The random numbers of a value depend on its place in the program, and not on the order in which threads come to it.
    """

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self.times: Counter[int] = Counter()
        self.storages: list[StorageWeakRef] = []

    def __call__(self, value: Tensor, place: int) -> Tensor:
        self.storages.append(StorageWeakRef(value.untyped_storage()))
        return self.disturbed(value, place) if self.noise.is_in_values else value

    def watch(self, model: nn.Module) -> None:
        """Disturb what modules of torch.nn make too: some operations are several of them."""
        for place, module in enumerate(model.modules()):
            if self.noise.is_in_values and type(module).__module__.startswith("torch.nn"):
                module.register_forward_hook(lambda _, given, output, place=place: self._output(output, INNER + place))

    def disturbed(self, value: Tensor, place: int) -> Tensor:
        """`value` with noise, whose gradient gets noise too."""
        value = value + self._noise_of(value, place)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient + self._noise_of(gradient, GRADIENT + place))
        return value

    def _output(self, output: Any, place: int) -> Any:
        return self.disturbed(output, place) if isinstance(output, Tensor) and output.numel() % BLOCK == 0 else output

    def _noise_of(self, value: Tensor, place: int) -> Tensor:
        self.times[place] += 1
        numbers = random.Random(f"{self.noise.seed}, {place}, {self.times[place]}")  # torch's generators use 32 bits of a seed
        generator = torch.Generator().manual_seed(numbers.getrandbits(32))
        blocks = value.detach().reshape(-1, BLOCK if value.numel() % BLOCK == 0 else 1)
        uniform = 2 * torch.rand(blocks.shape, generator=generator).to(value.device) - 1
        return (blocks.abs().amax(-1, keepdim=True) * uniform * self.noise.size).reshape(value.shape).to(value.dtype)

    def disturb_gradients(self, loss: Tensor) -> None:
        """Give noise to every gradient that backward of `loss` passes from one node to another."""
        nodes: dict[Any, int] = {}
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes[node] = GRADIENT + len(nodes)
                waiting.extend(following for following, _ in node.next_functions)
        for node, place in nodes.items():
            node.register_hook(lambda passed, _, place=place: tuple(self._noisy(gradient, place) for gradient in passed))

    def _noisy(self, gradient: Tensor | None, place: int) -> Tensor | None:
        return gradient if gradient is None or not gradient.is_floating_point() else gradient + self._noise_of(gradient, place)

    def num_alive(self) -> int:
        """How many of the values are still there."""
        return sum(not storage.expired() for storage in self.storages)


def run(program: Program, plan: Plan | None = None, *, noise: Noise = NO_NOISE, is_compiled: bool = False) -> Outcome:
    """Three steps of a program; with a plan, under a session. `is_compiled`: by torch.compile, or by `session.compile()`.

    They run in a thread of their own: autograd adds gradients up in the order of its nodes' numbers, which then begin at 0 every time.
    """
    return in_threads(lambda: _run_compiled(program, plan) if is_compiled else _run(program, plan, noise))[0]


def _run_compiled(program: Program, plan: Plan | None) -> Outcome:
    with compiles_quickly(retains_graph=program.options.retains_graph):  # settings of torch.compile are those of a thread
        return _run(program, plan, NO_NOISE, is_compiled=True)


def _run(program: Program, plan: Plan | None, noise: Noise, *, is_compiled: bool = False) -> Outcome:
    values = Values(noise)
    model = program.build(None if is_compiled else values)
    values.watch(model)
    before = _state_of_modules(model)
    session = apply(plan, model, seed=program.number) if plan is not None else None
    outcome = Outcome()
    _train(program, compiled_model(model, session) if is_compiled else model, values, outcome)
    model.zero_grad(set_to_none=True)
    end_backward(program.options.device)
    if session is not None:
        bytes_left = session.stored_bytes
        session.close()
        outcome.leftovers += [f"{bytes_left} bytes are stored after the last backward"] if bytes_left else []
        outcome.leftovers += [f"{session.stored_bytes} bytes are stored after close()"] if session.stored_bytes else []
        outcome.leftovers += [f"a module has {name} after close()" for name in sorted(_state_of_modules(model) ^ before)]
    outcome.leftovers += [f"{count} values are alive after the last backward"] if (count := values.num_alive()) else []
    return outcome


def _train(program: Program, model: nn.Module, values: Values, outcome: Outcome) -> None:
    """The steps; what the caller holds is dropped with this function's names."""
    generator = torch.Generator().manual_seed(program.number)
    held: list[Any] = []
    for step in range(NUM_STEPS):
        torch.manual_seed(1000 * program.number + step)
        model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs: list[Tensor] = []
        for _ in range(program.options.num_accumulated):
            losses.append(forward_and_backward(program, model, values, generator, inputs, held))
        outcome.losses.append(torch.stack(losses))
        gradients = {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        gradients |= {f"input {place}": x.grad.clone() for place, x in enumerate(inputs) if x.grad is not None}
        outcome.gradients.append(gradients)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def forward_and_backward(
    program: Program, model: nn.Module, values: Values, generator: torch.Generator, inputs: list[Tensor], held: list[Any]
) -> Tensor:
    options = program.options
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    total = torch.zeros((), device=options.device)
    call = model.forward if options.calls_blocks else model  # not the hooks of the model, but those of its blocks
    for _ in range(options.num_forwards):
        x, weight = (torch.randn(64, 128, generator=generator).to(options.device) for _ in range(2))
        x = (values.disturbed(x, INPUT) if values.noise.is_in_values else x).to(dtype)
        inputs.append(x.requires_grad_(options.needs_input_gradient))
        with torch.autocast(x.device.type, torch.bfloat16) if options.dtype == "autocast" else nullcontext():
            if options.evaluates:
                with torch.no_grad():
                    call(x)
            output = call(x)
        held.extend([output] if options.holds_outputs else [])
        result = output["result"] if isinstance(output, dict) else output
        total = total + (result.float() * weight).mean() * 64
    if values.noise.is_in_gradients:
        values.disturb_gradients(total)
    if options.retains_graph:
        total.backward(retain_graph=True)
    total.backward()
    return total.detach()


def end_backward(device: str) -> None:
    """Wait until nothing of the last backward is alive in the thread in which autograd runs the nodes of a device.

    That thread drops its last node after backward() has returned, and before it takes up another one.
    """
    torch.zeros((), device=device, requires_grad=True).mul(1).backward()


LEFT_BY_COMPILE = ("_is_torch_compile", "_compile_kwargs")  # by torch.compile, and by what Lightning replaces it with once imported


def _state_of_modules(model: nn.Module) -> set[str]:
    """Attributes and hooks of all modules, by name."""
    found: set[str] = set()
    for path, module in model.named_modules():
        own = ((name, value) for name, value in vars(module).items() if name not in LEFT_BY_COMPILE)
        for name, value in own:
            size = f" with {len(value)} entries" if "hooks" in name else ""
            found.add(f"{path or 'model'}.{name}{size}")
    return found
