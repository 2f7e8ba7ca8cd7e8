"""A training step under a session, captured in a CUDA graph: the losses of the uncaptured run, and new random bits at each replay."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paredown import Guard, Plan, apply, trace_step
from paredown.errors import ApplyError
from paredown.session.eager.activations import Activations
from paredown.session.session import Session

WARM_UP, NUM_STEPS = 4, 6


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)]
    return nn.Sequential(*layers).to(device)


def batches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(128, 256, generator=generator).cuda() for _ in range(num)]


def prepared(lr: float = 0.05) -> tuple[nn.Module, Session, Tensor, Callable[[], Tensor]]:
    """A model, its session, the static input, and a step on that input."""
    model, x = network("cuda"), torch.zeros(128, 256, device="cuda")
    session = apply(Plan.uniform(activation="uint4/32@bf16+bf16", rounding="stochastic"), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def whole_step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        return step()

    return model, session, x, whole_step


def warm_up(x: Tensor, step: Callable[[], Tensor], inputs: list[Tensor]) -> list[float]:
    side, losses = torch.cuda.Stream(), list[Tensor]()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one in inputs:
            x.copy_(one)
            losses.append(step())
    torch.cuda.current_stream().wait_stream(side)
    return [float(loss) for loss in losses]


@pytest.mark.gpu
def test_a_captured_step_has_the_losses_of_the_uncaptured_run() -> None:
    inputs = batches(WARM_UP + NUM_STEPS)
    _, session, x, step = prepared()
    expected = warm_up(x, step, inputs)
    num_forwards = session.forwards
    session.close()
    _, session, x, step = prepared()
    found = warm_up(x, step, inputs[:WARM_UP])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for one in inputs[WARM_UP:]:
        x.copy_(one)
        graph.replay()
        found.append(float(loss))
    assert found == expected
    assert session.forwards == num_forwards == session.state_dict()["forwards"]
    x.copy_(inputs[0])
    step()
    assert session.forwards == num_forwards + 1, "an uncaptured step after replays continues the count"


@pytest.mark.gpu
def test_every_replay_draws_new_random_bits() -> None:
    (one,) = batches(1)
    model, session, x, step = prepared(lr=0.0)
    warm_up(x, step, [one] * WARM_UP)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gradients: list[Tensor] = []
    for _ in range(3):
        graph.replay()
        gradients.append(model.get_parameter("3.weight").grad.clone())  # type: ignore[union-attr]
    assert not torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[1], gradients[2])
    session.close()


@pytest.mark.gpu
def test_a_capture_without_steps_before_it_is_refused() -> None:
    _, session, _, step = prepared()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ApplyError, match="Run three training steps"), torch.cuda.graph(graph):
        step()
    session.close()


# --- without a GPU -----------------------------------------------------------------------------------------------------------------


def test_a_graph_counts_forward_passes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = Activations(Plan.preset("activations4"), seed=0)
    activations.forwards = 3
    counter = activations.count.on_device[0] = torch.tensor([3], dtype=torch.int32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    activations.begin(is_sharded=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    counter.add_(4)  # what replays do
    assert activations.forwards == 8
    activations.begin(is_sharded=False)
    assert activations.forwards == 9 == int(counter)
    activations.resume(seed=1, forwards=2)
    activations.begin(is_sharded=False)
    assert activations.forwards == 3 == int(counter)


def test_a_model_with_graphed_callables_is_refused() -> None:
    def make_graphed_callables(module: nn.Module) -> None:
        forward = module.forward

        def new_fwd(*args: Any) -> Any:
            return forward(*args)

        new_fwd.__qualname__ = "make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"
        module.forward = new_fwd  # type: ignore[method-assign]

    model = network("cpu")
    make_graphed_callables(model[3])  # type: ignore[index]
    with pytest.raises(ApplyError, match=r"its module '3' went through torch\.cuda\.make_graphed_callables"):
        apply(Plan.preset("activations4"), model)


def test_a_session_with_a_guard_refuses_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network("cpu"), torch.randn(128, 256)
    trace = trace_step(model, (x, torch.randn(128, 64)), loss=nn.functional.mse_loss, optimizer="sgd")
    session = apply(Plan.preset("activations4"), model, guard=Guard(trace))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ApplyError, match="Capture a session without a guard"):
        model(x)
    monkeypatch.undo()
    model(x)
    session.close()
