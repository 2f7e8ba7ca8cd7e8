"""Reports: trials, picks and trainings as one record, and the HTML page that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paredown.lazy import loader

if TYPE_CHECKING:
    from paredown.study.report.page import render, write
    from paredown.study.report.record import Record
    from paredown.study.report.server import Server, open_source

__all__ = ["Record", "Server", "open_source", "render", "write"]

__getattr__ = loader(__name__, page="render write", record="Record", server="Server open_source")
