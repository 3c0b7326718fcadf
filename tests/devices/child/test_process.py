from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import environment, is_running
from line_child import LineChild

from autoaccum.devices.child import process
from autoaccum.devices.child.failures import ChildDied
from autoaccum.devices.child.process import PACKAGE_ROOT, child_environment
from autoaccum.errors import UsageError

Start = Callable[..., LineChild]
_STARTS_ANOTHER = "import multiprocessing as m; m.get_context('fork').Process(target=time.sleep, args=(60,)).start()"
VARIABLES = environment(PYTHONPATH=f"{PACKAGE_ROOT}:{PACKAGE_ROOT / 'tests/shared'}")


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[LineChild] = []

    def start_child(on_output: Callable[[str], None] | None = None) -> LineChild:
        children.append(LineChild(on_output))
        return children[-1]

    yield start_child
    for child in children:
        child.end()


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_answers_and_leaves(start: Start) -> None:
    child = start()
    assert child.do("answer.update(pid=os.getpid(), parent=os.getppid())") == {"pid": child.pid, "parent": os.getpid()}
    assert child.do("pass") == {}
    assert (child.alive, child.calls) == (True, 2)
    child.close()
    child.end()
    assert not child.alive
    assert not is_running(child.pid)


def test_passes_what_the_child_prints_line_by_line(start: Start) -> None:
    lines: list[str] = []
    child = start(lines.append)
    child.do("print('to stdout', flush=True); os.write(2, b'to \\xff stderr\\nand half')")
    deadline = time.monotonic() + 5
    while len(lines) < 2 and time.monotonic() < deadline:
        child.do("pass")
    assert lines == ["to stdout", "to � stderr"]
    child.end()
    assert lines[-1] == "and half"


def test_without_a_listener_the_child_prints_to_stderr() -> None:
    script = "from line_child import LineChild as C; c = C(); c.do('print(\"from the child\", flush=True)'); c.end()"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, env=VARIABLES, check=True)
    assert (done.stdout, done.stderr) == ("", "from the child\n")


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_no_child() -> None:
    job = "print(os.getpid(), flush=True); time.sleep(60)"
    script = f"from line_child import LineChild as C; c = C(print); print(c.pid); c.do({job!r}, copy='new')"
    words = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=VARIABLES) as parent:
        assert parent.stdout is not None
        child, copy = int(parent.stdout.readline()), int(parent.stdout.readline())
        assert is_running(child)
        assert is_running(copy)
        parent.kill()
    assert wait_until_gone(child)
    assert wait_until_gone(copy)


def test_a_copy_answers_and_leaves_the_process_as_it_is(start: Start) -> None:
    child = start()
    for _ in range(2):
        answer = child.do("answer.update(seen=hasattr(sys, 'seen'), parent=os.getppid()); sys.seen = 1", copy="new")
        assert answer == {"seen": False, "parent": child.pid}
    lines = "answer.update(pid=os.getpid(), seen=hasattr(sys, 'kept')); sys.kept = 1"
    kept = [child.do(lines, copy="kept") for _ in range(2)]
    assert [answer["seen"] for answer in kept] == [False, True]
    assert kept[0]["pid"] == kept[1]["pid"] != child.pid
    assert not child.do(lines, copy="new")["seen"]
    assert not child.do(lines)["seen"]
    child.close()
    assert not child.alive
    assert wait_until_gone(kept[0]["pid"])


@pytest.mark.parametrize("copy", ["new", "kept"])
def test_a_copy_that_dies_or_leaves_waits_for_no_process_that_it_has_started(start: Start, copy: Any) -> None:
    child, began = start(), time.monotonic()
    child.do(_STARTS_ANOTHER, copy="new")
    assert child.do("answer['next'] = True", copy=copy) == {"next": True}
    with pytest.raises(ChildDied, match="left with exit status 9"):
        child.do("os._exit(9) if os.fork() else time.sleep(60)", copy=copy)
    assert time.monotonic() - began < 30


def test_a_copy_leaves_what_the_original_has_started_to_it_and_ends_its_own(start: Start) -> None:
    lines: list[str] = []
    child = start(lines.append)
    makes_folder = "import tempfile; sys.made = tempfile.TemporaryDirectory(); answer['folder'] = sys.made.name"
    child.do(f"{_STARTS_ANOTHER}; import atexit; atexit.register(print, 'left')")
    folder = child.do(makes_folder)["folder"]
    made = child.do(makes_folder, copy="new")["folder"]
    child.do("pass", copy="new")
    assert Path(folder).exists()
    assert not Path(made).exists()
    assert child.do("import multiprocessing as m; answer['running'] = len(m.active_children())") == {"running": 1}
    assert lines == []


def test_only_a_process_that_learns_how_its_children_end_can_be_copied(start: Start) -> None:
    answer = start().do("""
        from autoaccum.devices.child.requests import can_be_copied
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        answer["can_be_copied"] = can_be_copied()
    """)
    assert answer == {"can_be_copied": False}


def test_only_a_process_without_threads_can_be_copied(start: Start) -> None:
    answer = start().do("""
        import numpy, threading  # OpenBLAS ends its threads before a fork.
        from autoaccum.devices.child.requests import can_be_copied
        answer["alone"] = can_be_copied()
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        answer["beside_a_thread"] = can_be_copied()
    """)
    assert answer == {"alone": True, "beside_a_thread": False}


@pytest.mark.slow
@pytest.mark.parametrize("copy", [None, "new", "kept"])
@pytest.mark.parametrize(
    ("lines", "number", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", signal.SIGSEGV, "was ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL, "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 35)", 35, "was ended by signal 35"),
        ("os._exit(0)", None, "left with exit status 0"),
        ("subprocess.Popen(['sleep', '60'], close_fds=False); os._exit(9)", None, "left with exit status 9"),
    ],
)
def test_notices_every_way_of_dying(start: Start, lines: str, number: int | None, text: str, copy: Any) -> None:
    child = start()
    with pytest.raises(ChildDied, match=f"^a job: its process {text}$") as death:
        child.do(lines, copy=copy)
    assert (death.value.signal, death.value.timed_out) == (number, False)
    assert (death.value.failure.outcome, death.value.failure.fault) == ("error", "measurement")
    assert not child.alive
    assert wait_until_gone(child.pid)


def test_notices_that_the_connection_is_closed(start: Start) -> None:
    with pytest.raises(ChildDied, match="^a job: its process closed the connection it answers on$"):
        start().do("os.closerange(3, 64); time.sleep(60)")


def test_a_child_that_hangs_is_ended(start: Start) -> None:
    child = start()
    with pytest.raises(ChildDied, match=r"^a job took longer than 0\.5 s, and was ended: look for") as death:
        child.do("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)", seconds=0.5)
    assert death.value.timed_out
    assert death.value.seconds >= 0.5
    assert wait_until_gone(child.pid)


def test_a_kill_counts_as_out_of_memory_only_when_the_kernel_counted_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, counts = start(), iter([3, 4])
    monkeypatch.setattr(process, "count_oom_kills", lambda: next(counts))
    with pytest.raises(ChildDied, match="for lack of memory") as death:
        child.do("os.kill(os.getpid(), signal.SIGKILL)")
    assert death.value.failure.outcome == "oom"


def test_grandchildren_are_ended_too(start: Start) -> None:
    child = start()
    grandchild = child.do("answer['pid'] = subprocess.Popen(['sleep', '60']).pid")["pid"]
    assert is_running(grandchild)
    child.close()
    assert wait_until_gone(grandchild)


@pytest.mark.parametrize("copy", [None, "kept"])
def test_semaphores_of_a_workload_are_gone_with_its_child(start: Start, copy: Any) -> None:
    """Its group is killed right after it, and the process that would remove them with it."""
    child = start()
    name = child.do(
        """
        import builtins
        from multiprocessing import get_context
        builtins.lock = get_context("spawn").Lock()  # As of a pool of processes; it lives as long as the child.
        answer["name"] = builtins.lock._semlock.name
    """,
        copy=copy,
    )["name"]
    semaphore = Path(f"/dev/shm/sem.{name[1:]}")
    assert semaphore.exists()
    child.close()
    assert not semaphore.exists()


def test_an_interrupt_ends_the_child_and_goes_on(start: Start) -> None:
    child = start()
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        child.do("time.sleep(60)")
    assert wait_until_gone(child.pid)


def test_a_child_starts_no_children_of_its_own(start: Start) -> None:
    reply = start().do("""
        from line_child import LineChild
        try:
            LineChild()
        except Exception as error:
            answer.update(kind=type(error).__name__, text=str(error))
    """)
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
