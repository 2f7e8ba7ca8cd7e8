"""Pick the plan that a new task should train under: prior, posterior, acquisition, Pareto front, and the answer with its reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.study.pick.answer import Frontier, Picked
    from paredown.study.pick.posterior import Estimate, Prior

__all__ = ["Estimate", "Frontier", "Picked", "Prior"]

__getattr__ = loader(__name__, answer="Frontier Picked", posterior="Estimate Prior")
