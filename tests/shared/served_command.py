"""The program `autoaccum` for git and shells, which the test's own process answers, with warm children."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from command_line import Command

_Result = TypeVar("_Result")
_PROGRAM = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect({address!r})
    asking.sendall(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]).encode() + b"\\n")
    code, stdout, stderr = json.load(asking.makefile())
sys.stdout.write(stdout)
sys.stderr.write(stderr)
sys.exit(code)
"""


def with_program(folder: Path, command: Command, call: Callable[[Path], _Result]) -> _Result:
    """Return what `call` does, which is given a program in `folder`; `command` runs here what the program is asked."""
    program, address = folder / "autoaccum", str(folder / "asked")
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as asked, ThreadPoolExecutor(1) as pool:
        asked.bind(address)
        asked.listen()
        asked.settimeout(0.05)
        result = pool.submit(call, program)
        while not result.done():
            try:
                connection, _ = asked.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(None)
                place, words, variables = json.loads(connection.makefile().readline())
                own = {name: value for name, value in variables.items() if os.environ.get(name) != value}
                done = command(Path(place), *words, **own)
                connection.sendall(json.dumps([done.returncode, done.stdout, done.stderr]).encode())
    Path(address).unlink()
    return result.result()
