from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoaccum.devices.child import process
from autoaccum.devices.child.failures import ChildDied
from autoaccum.devices.child.process import PACKAGE_ROOT, ChildProcess, child_environment
from autoaccum.errors import UsageError

PREAMBLE = """
import os, signal, subprocess, sys, time
from autoaccum.devices.child.requests import ParentConnection
lifeline = ParentConnection(sys.argv[1:])
def answer(**reply): lifeline.reply(reply)
while (request := lifeline.read()) is not None:
"""

Start = Callable[..., ChildProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A child that runs `body` for every request."""
    children: list[ChildProcess] = []

    def start_child(body: str, on_output: Callable[[str], None] | None = None) -> ChildProcess:
        (tmp_path / "small_child.py").write_text(PREAMBLE + textwrap.indent(textwrap.dedent(body), "    "))
        children.append(ChildProcess("small_child", on_output=on_output))
        return children[-1]

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield start_child
    for child in children:
        child.end()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_answers_and_leaves(start: Start) -> None:
    child = start("answer(pid=os.getpid(), parent=os.getppid(), sum=sum(request['numbers']))")
    reply = child.ask({"numbers": [1, 2, 3]}, 10)["reply"]
    assert reply == {"pid": child.pid, "parent": os.getpid(), "sum": 6}
    assert child.ask({"numbers": []}, 10)["reply"]["sum"] == 0
    assert child.alive
    child.end(grace_seconds=5)
    child.end()
    assert not child.alive
    assert not is_running(child.pid)


def test_passes_what_the_child_prints_line_by_line(start: Start) -> None:
    lines: list[str] = []
    child = start("print('to stdout', flush=True); os.write(2, b'to \\xff stderr\\nand half'); answer()", lines.append)
    child.ask({}, 10)
    deadline = time.monotonic() + 5
    while len(lines) < 2 and time.monotonic() < deadline:
        child.ask({}, 10)
    assert lines[:2] == ["to stdout", "to � stderr"]
    child.end()
    assert lines[-1] == "and half"


def test_without_a_listener_the_child_prints_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "small_child.py").write_text(PREAMBLE + "    print('from the child', flush=True); answer()")
    script = (
        "from autoaccum.devices.child.process import ChildProcess as C; c = C('small_child'); c.ask({}, 10); c.end()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PACKAGE_ROOT}"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert (run.stdout, run.stderr) == ("", "from the child\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal", "was ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 35)", "signal", "was ended by signal 35"),
        ("sys.exit(0)", "exit", "left with exit status 0"),
        ("os.closerange(3, 64); time.sleep(60)", "pipe", "closed the connection"),
        ("subprocess.Popen(['sleep', '60'], close_fds=False); os._exit(9)", "exit", "left with exit status 9"),
    ],
)
def test_notices_every_way_of_dying(start: Start, body: str, kind: str, text: str) -> None:
    child = start(body)
    with pytest.raises(ChildDied, match=text) as caught:
        child.ask({}, 20)
    assert caught.value.kind == kind
    assert not caught.value.out_of_memory
    assert not child.alive
    assert wait_until_gone(child.pid)


def test_a_child_that_hangs_is_ended(start: Start) -> None:
    child = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)")
    with pytest.raises(ChildDied, match=r"was ended after 0\.5 s") as caught:
        child.ask({}, 0.5)
    assert caught.value.kind == "limit"
    assert wait_until_gone(child.pid)


def test_a_kill_counts_as_out_of_memory_only_when_the_kernel_counted_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(process, "count_oom_kills", lambda: next(counts))
    child = start("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ChildDied, match="for lack of memory") as caught:
        child.ask({}, 10)
    assert caught.value.out_of_memory


def test_grandchildren_are_ended_too(start: Start) -> None:
    child = start("answer(pid=subprocess.Popen(['sleep', '60']).pid)")
    grandchild = child.ask({}, 10)["reply"]["pid"]
    assert is_running(grandchild)
    child.end(grace_seconds=5)
    assert wait_until_gone(grandchild)


def test_an_interrupt_ends_the_child_and_goes_on(start: Start) -> None:
    child = start("time.sleep(60)")
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        child.ask({}, 30)
    assert wait_until_gone(child.pid)


def test_a_child_starts_no_children_of_its_own(start: Start) -> None:
    child = start("""
        from autoaccum.devices.child.process import ChildProcess
        try:
            ChildProcess("small_child")
        except Exception as error:
            answer(kind=type(error).__name__, text=str(error))
    """)
    reply = child.ask({}, 20)["reply"]
    assert reply["kind"] == UsageError.__name__
    assert '__name__ == "__main__"' in reply["text"]


def test_a_child_finds_the_autoaccum_of_its_parent_without_an_installation() -> None:
    assert (PACKAGE_ROOT / "autoaccum" / "__init__.py").is_file()
    assert child_environment()["PYTHONPATH"].split(os.pathsep)[0] == str(PACKAGE_ROOT)


def test_a_child_is_alone_whatever_its_parent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_KEY", "kept")
    left = {name for name in child_environment() if "RANK" in name or "WORLD" in name or "ELASTIC" in name}
    assert left == set()
    assert {name for name in child_environment() if name.startswith("MASTER")} == {"MASTER_KEY"}
