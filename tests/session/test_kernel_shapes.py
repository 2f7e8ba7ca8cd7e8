"""The kernels that Inductor makes for the graphs of a session."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import paredown as pare

pytestmark = pytest.mark.gpu
WIDTH = 2048


def norms() -> nn.Module:
    return nn.Sequential(*(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2)), nn.GELU()).cuda()


def rows_in_registers(model: nn.Module) -> bool:
    """Whether all kernels that reduce rows hold them: Inductor's name for them begins with triton_per."""
    x = torch.randn(64, WIDTH, device="cuda", requires_grad=True)
    _, code = run_and_get_code(lambda: model(x).square().sum().backward())
    text = "\n".join(code)
    assert "triton_per" in text or "triton_red" in text
    return "triton_red" not in text


def test_packed_graphs_hold_rows_and_other_graphs_are_torchs_own() -> None:
    torch.compiler.reset()
    with pare.apply(pare.Plan.preset("activations8"), norms()) as session:
        assert rows_in_registers(session.compile())
    torch.compiler.reset()
    assert not rows_in_registers(torch.compile(norms()))


def test_compiled_products_call_the_kernels_that_quantize_columns() -> None:
    """The code of forward and backward calls no operator of Python, and the gradient is that of eager mode.

    Beside the middle of two codes, quotients of compiled kernels may round otherwise.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    net, x = nn.Linear(256, 128, bias=False).cuda().bfloat16(), torch.randn(4104, 256, device="cuda", dtype=torch.bfloat16)
    model = nn.Sequential(net)
    with pare.apply(pare.Plan().set("product=0", "e4m3fn"), model) as session:
        model(x).square().sum().backward()
        assert net.weight.grad is not None
        expected, net.weight.grad = net.weight.grad, None
        compiled = session.compile()
        _, code = run_and_get_code(lambda: compiled(x).square().sum().backward())
    text = "\n".join(code)
    assert "= column_quantizer(" in text and "= transposer(" in text
    assert "ops.paredown.quantize_columns" not in text and "ops.paredown.transposed_codes" not in text
    assert net.weight.grad is not None
    assert float((net.weight.grad - expected).norm() / expected.norm()) < 0.005


def test_compiled_products_write_their_ones_once() -> None:
    """Backward reads scales of one for the second operand of every product: a buffer that one kernel of the graph writes."""
    torch.compiler.reset()
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    net, x = nn.Sequential(*layers).cuda().bfloat16(), torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    plan = pare.Plan.uniform(activation="int8/64@bf16")
    for i in range(4):
        plan = plan.set(f"product={i}", "e4m3fn")
    with pare.apply(plan, net) as session:
        compiled = session.compile()
        _, code = run_and_get_code(lambda: compiled(x).square().sum().backward())
    launches = [line for line in code[-1].splitlines() if ".run(" in line and "row_product" in line]
    filled = [line for line in launches if re.search(r"\.run\(buf\d+, 256, stream", line)]
    assert len(filled) == 1
