"""Kernels of Inductor on the CPU with vector instructions, which conftest.py turns off."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import torch._inductor.config as inductor_config
from torch._inductor import cpu_vec_isa


@contextmanager
def vector_instructions() -> Generator[None]:
    """A context in which kernels use AVX2, on every x86 processor that has it; other processors' as Inductor finds them."""
    x86 = cpu_vec_isa.x86_isa_checker()
    found = [cpu_vec_isa.VecAVX2()] if "avx2" in x86 else cpu_vec_isa.valid_vec_isa_list()
    with patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: found), inductor_config.patch({"cpp.vec_isa_ok": True}):
        yield
