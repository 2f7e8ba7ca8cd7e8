"""Priors: errors of earlier tasks under plans, as data, as files, and collected from trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.study.priors.prior_collection import collect, read_rows
    from paredown.study.priors.prior_files import add, available, known_prior, load, made_up_prior, remove, write_prior

__all__ = ["add", "available", "collect", "known_prior", "load", "made_up_prior", "read_rows", "remove", "write_prior"]

__getattr__ = loader(
    __name__, prior_collection="collect read_rows", prior_files="add available known_prior load made_up_prior remove write_prior"
)
