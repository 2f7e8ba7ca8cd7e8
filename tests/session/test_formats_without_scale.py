"""Formats that cannot store a role are refused in store mode: plans from Python and from files, footprints, and the command line."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import paredown as pare
from paredown.errors import OptimError, PlanError
from paredown.optim import AdamW
from tests.cli.commands import ask

ROLES = ("weight", "frozen", "gradient", "moment1", "moment2", "master", "activation")
UNSCALED = ("int8", "int2", "int16", "uint4", "nf4", "e2m1fn", "e8m0", "[-1 -0.5 0 1]")
WRITE = re.compile(r"; write (\S.*?)\. ")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64))
    net[0].requires_grad_(False)
    return net


def values_of(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("text", UNSCALED)
def test_formats_without_a_scale_are_refused(role: str, text: str, tmp_path: Path) -> None:
    pare.Plan.uniform(**{role: text}).save(tmp_path / "plan.json")  # type: ignore[arg-type]
    plan, net = pare.Plan.load(tmp_path / "plan.json"), network()
    before, trace = values_of(net), pare.trace_step(net, (torch.zeros(4, 96), torch.zeros(4, 64)), loss=nn.functional.mse_loss)
    messages = set[str]()
    for refused in (lambda: pare.apply(plan, net), lambda: pare.footprint(trace, plan)):
        with pytest.raises(PlanError, match=f"^rule '{role}': ") as error:
            refused()
        messages.add(str(error.value))
    assert len(messages) == 1 and text in messages.pop()
    assert all(torch.equal(*pair) for pair in zip(values_of(net), before, strict=True))

    write = WRITE.search(str(error.value))
    assert write is not None
    with pare.apply(pare.Plan.uniform(**{role: write[1]}), net):  # type: ignore[arg-type]
        net(torch.randn(4, 96)).square().mean().backward()
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(values_of(net), before, strict=True)]
    assert max(errors) < (0.6 if text in ("int2", "[-1 -0.5 0 1]") else 0.2)


@pytest.mark.parametrize("key", ["2.weight", "weight=2.*", "2*", "1:input", "frozen=0.weight"])
def test_rules_for_single_slots_are_refused_too(key: str) -> None:
    with pytest.raises(PlanError, match=f"^rule {re.escape(repr(key))}: int8 has no scale.* write int8/64@bf16"):
        pare.apply(pare.Plan().set(key, "int8"), network())


def test_unsigned_integers_without_a_minimum_store_no_weights() -> None:
    for role in ("weight", "frozen", "gradient", "moment1"):
        with pytest.raises(PlanError, match="uint8/64@bf16 has no code for negative values; write int8/64@bf16"):
            pare.apply(pare.Plan.uniform(**{role: "uint8/64@bf16"}), network())  # type: ignore[arg-type]
    pare.apply(pare.Plan.uniform(moment2="uint8/64@bf16", weight="uint8/64@bf16+bf16"), network()).close()


def test_floats_with_the_range_of_weights_need_no_scale() -> None:
    net = network()
    before = net[2].weight.detach().clone()
    with pare.apply(pare.Plan.uniform(weight="e4m3fn", residue="int8", gradient="bf16"), net):
        assert torch.equal(net[2].weight.detach().clone(), before.to(torch.float8_e4m3fn).float())


def test_simulate_mode_takes_formats_without_a_scale() -> None:
    net = network()
    x = torch.randn(4, 96)
    w, b = (p.detach().clone() for p in net[2].parameters())
    with pare.apply(pare.Plan.uniform(weight="int8", rounding="nearest_even"), net, mode="simulate"):
        assert torch.equal(net(x), torch.zeros_like(net(x))), "weights below a half round to 0 in steps of 1"
    assert torch.equal(net[2].weight, w) and torch.equal(net[2].bias, b)


def test_keywords_of_optimizers_are_checked_by_the_same_rule() -> None:
    for role in ("weight", "moment1", "moment2", "gradient"):
        with pytest.raises(OptimError, match=f"{role}=int8 has no scale.*write int8/64@bf16"):
            AdamW(network().parameters(), **{role: "int8"})


def test_optimizers_update_no_weights_in_8_bit_floats_without_a_scale() -> None:
    text = "weight=e4m3fn has no scale: optimizers update weights in .* Give weight='e4m3fn/64@bf16'"
    with pytest.raises(OptimError, match=text):
        AdamW(network().parameters(), weight="e4m3fn")
    net = network()
    with pare.apply(pare.Plan.uniform(weight="e4m3fn"), net), pytest.raises(OptimError, match=f"0.weight: {text}"):
        AdamW(net.parameters())


def test_levels_of_assign_are_checked() -> None:
    trace = pare.trace_step(network(), (torch.zeros(64, 96), torch.zeros(64, 64)), loss=nn.functional.mse_loss)
    with pytest.raises(PlanError, match=r"levels: int4 has no scale.*write int4/64@bf16"):
        pare.assign(trace, "50%", levels=("int8/64@bf16", "int4"))


def test_estimate_refuses_what_apply_refuses() -> None:
    status, out, err = ask("estimate", "gpt", "--device", "cpu", "--lora", "4", "--frozen", "nf4", "--budget", "8GiB")
    assert status == 1 and "fits" not in out.lower()
    assert "rule 'frozen': nf4 has no scale" in " ".join(err.split()) and "nf4/64@bf16" in err
