"""Explanations of out-of-memory errors: in loops, beside sessions, and for a trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paredown as pare
from paredown.check.out_of_memory import add_explanation, explain_shortage, is_out_of_memory


class Layers(nn.Module):
    """Four layers, and an argument with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.layers(x) * scale


def note_of(model: nn.Module, *rows: int, **named: float) -> str:
    """The note of the error that ends a loop over batches of so many rows."""
    with pytest.raises(torch.OutOfMemoryError) as caught, pare.explain_oom(model, optimizer="adamw"):
        for num in rows:
            loss = model(torch.randn(num, 64), **named).square().mean()
            if num == rows[-1]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            loss.backward()
    assert len(caught.value.__notes__) == 2 and "The loss is computed outside of the model" in caught.value.__notes__[1]
    return caught.value.__notes__[0]


def test_a_loss_that_the_model_returns_is_counted_and_outputs_without_a_gradient_are_said() -> None:
    class WithLoss(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x).square().mean()}

    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    for model, num, said in ((WithLoss(64, 64), 1, "grew most"), (Detached(64, 64), 2, "no tensor that requires a gradient")):
        with pytest.raises(MemoryError) as caught, pare.explain_oom(model):
            model(torch.randn(8, 64))
            raise MemoryError("out of memory")
        assert len(caught.value.__notes__) == num and said in caught.value.__notes__[0]


@pytest.mark.parametrize("named", [{}, {"scale": 2.0}], ids=["positional", "named"])
def test_a_loop_of_ones_own_is_explained(named: dict[str, float]) -> None:
    """The batch of the failed call counts, under the plan of the open session."""
    model = Layers()
    note = note_of(model, 64, 4096, **named)
    trace = pare.trace_step(model, (torch.empty(4096, 64), None), loss=lambda y, _: y.mean(), optimizer="adamw", device="cpu")
    peak = pare.footprint(trace).peak_bytes
    assert note.startswith("paredown: activation grew most") and f"of {peak / 2**20:.2f} MiB at the predicted peak" in note
    assert "next plan down is 'activations8'" in note and "Most of it is in layers." in note
    with pare.apply(pare.Plan.preset("activations8"), model):
        assert "next plan down is 'activations4'" in note_of(model, 4096, **named)
    assert not model._forward_pre_hooks


def test_autocast_around_the_call_counts() -> None:
    model = Layers()
    with torch.autocast("cpu", torch.bfloat16):
        in_bfloat16 = note_of(model, 4096)
    assert in_bfloat16 != note_of(model, 4096)


def test_other_errors_and_runs_without_a_call_are_left_as_they_are() -> None:
    model = Layers()
    with pytest.raises(RuntimeError, match="other") as caught, pare.explain_oom(model):
        model(torch.randn(8, 64))
        raise RuntimeError("another error")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(MemoryError) as early, pare.explain_oom(model):
        raise MemoryError
    assert "was not called with gradients" in early.value.__notes__[0]


def test_a_step_that_cannot_be_traced_keeps_its_error() -> None:
    class Choosy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.detach().sum()) != 0.5 and type(x) is Tensor else self.missing

    model = Choosy(4, 4)
    with pytest.raises(MemoryError) as caught, pare.explain_oom(model):
        model(torch.ones(2, 4))
        raise MemoryError("out of memory")
    assert "cannot be traced" in caught.value.__notes__[0]


def test_the_note_names_the_role_and_the_next_plan() -> None:
    model = Layers()
    trace = pare.trace_step(model, (torch.empty(2048, 64), torch.empty(2048, 64)), loss=mse_loss, optimizer="adamw", device="cpu")
    error = torch.OutOfMemoryError("CUDA out of memory.")
    add_explanation(error, trace, pare.Plan.preset("activations8"))
    assert error.__notes__[0].startswith("paredown: ") and "activations4" in error.__notes__[0]
    other = KeyError("x")
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    add_explanation(other, trace, pare.Plan())
    assert not hasattr(other, "__notes__")
    told = explain_shortage(trace, pare.Plan(), candidates={"a": 10, "b": 2**40})
    assert told.startswith("activation grew most, ") and "The next plan down is 'a', 10 B." in told


def test_the_next_plan_at_a_small_learning_rate_stores_weights_with_a_residue() -> None:
    """Weights of `half` and `lpmm` do not follow updates at 1e-5; a model with large weights needs one of the tiers."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    batch = (torch.empty(8, 512), torch.empty(8, 512))
    trace = pare.trace_step(model, batch, loss=mse_loss, optimizer="adamw", device="cpu")
    for learning_rate, tiers in ((None, ("half", "lpmm")), (1e-3, ("half", "lpmm")), (1e-5, ("fine_tune",))):
        shortage = explain_shortage(trace, pare.Plan(), learning_rate=learning_rate)
        assert any(f"The next plan down is '{tier}" in shortage for tier in tiers), shortage
