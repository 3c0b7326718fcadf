"""A child whose jobs are lines of Python."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Handler, Request


@dataclass(frozen=True)
class Lines(Request[dict[str, Any]]):
    """Run lines of Python; the reply is what they put into `answer`."""

    lines: str
    copy: Literal["new", "kept"] | None = None
    doing = "a job"


class LineHandler(Handler):
    def handle(self, request: Lines) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        exec(textwrap.dedent(request.lines), {"answer": answer})
        return answer


class LineChild(ChildProcess):
    def __init__(self, on_output: Callable[[str], None] | None = None) -> None:
        super().__init__("line_child:LineHandler", on_output=on_output, measured=False)

    def do(self, lines: str, seconds: float = 20, *, copy: Literal["new", "kept"] | None = None) -> dict[str, Any]:
        lines = f"import os, signal, subprocess, sys, time\n{textwrap.dedent(lines)}"
        return self.call(Lines(lines, copy), seconds)
