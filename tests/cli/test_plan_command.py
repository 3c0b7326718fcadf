"""`autoaccum plan` as a person runs it: a real process, real trials, a real terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, environment, invoke, is_running, wait_for
from factories import make_plan
from small_classifier import MODEL
from warm_children import Nurseries, wait

from autoaccum import api, files
from autoaccum.errors import UsageError
from autoaccum.planning.plan_record import Plan

SLOW = """
import os, time
from pathlib import Path

criterion = None

def loss(model, batch):
    Path("child.tmp").write_text(str(os.getpid()))
    os.replace("child.tmp", "child")
    time.sleep(300)
"""


WORDS = ("plan", "model.py", "--memory", "200MiB")


def test_the_answer_for_a_person(folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, "--target-batch", "96", "--max-micro-batch", "40", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.micro_batches == (32, 32, 32)
    names, values = zip(*((line[:13].rstrip(), line[13:]) for line in done.stdout.splitlines()), strict=True)
    assert names[:6] == ("micro-batch", "iter_size", "parts", "peak", "device", "train with")
    assert [name for name in names[6:] if name] == ["note", "kept in plan."], "no more than is needed"
    assert values[:3] == ("32", "3", "32 + 32 + 32 = 96")
    assert "headroom" in values[3]
    assert "Accumulator(model, optimizer, criterion=criterion, plan=autoaccum.Plan.load('plan.json'))" in values[5]
    lines = [line.split() for line in done.stderr.splitlines()]
    assert ["32", "ok"] in [line[:2] for line in lines]
    assert sum("ok" in line for line in lines) == len(plan.trials)
    assert "\x1b" not in done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "plan.json"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`plan` answers at once; what it was asked for."""
    asked: dict[str, Any] = {}

    def plan(workload: str, **request: Any) -> Plan:
        asked.update(request, workload=workload)
        return make_plan(2, 2, warnings=("BatchNorm is not exact",))

    monkeypatch.setattr(api, "plan", plan)
    return asked


def test_the_command_that_is_offered_is_the_one_that_ran(planned: dict[str, Any]) -> None:
    words = ["plan", "my model.py", "--target-batch", "2", "--memory", "80%", "--equal", "-q", "--world-size", "1"]
    words += ["--batchnorm", "frozen", "--no-coupled"]
    result = invoke(*words, "-v")
    offered = (
        "autoaccum plan 'my model.py' --target-batch 2 --memory 80% --batchnorm frozen --no-coupled --world-size 1"
    )
    assert f"  {offered} --equal -o plan.json\n" in result.stdout
    assert (planned["batchnorm"], planned["coupled"]) == ("frozen", False)
    assert (planned["workload"], planned["memory"], planned["equal"]) == ("my model.py", "80%", True)
    assert (planned["device"], planned["trial_limit"], planned["reserve"]) == ("auto", None, None)


@pytest.mark.parametrize(
    ("called", "offered"),
    [
        ("/venv/bin/autoaccum", "/venv/bin/autoaccum plan"),
        ("/site-packages/autoaccum/__main__.py", f"{sys.executable} -m autoaccum plan"),
    ],
)
def test_the_command_is_offered_as_it_was_called(
    planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch, called: str, offered: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setenv("PATH", "")
    result = invoke("plan", "--target-batch", "2", "-v", "--", "-odd.py")
    assert f"  {offered} ./-odd.py --target-batch 2 -o plan.json\n" in result.stdout


def test_a_plan_that_cannot_be_kept_is_shown(
    planned: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: bytes, *, force: bool) -> None:
        raise UsageError(f"{path} cannot be written (no space left)")

    monkeypatch.setattr(files, "write_bytes", write)
    result = invoke("plan", "m.py", "--target-batch", "2", "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert "micro-batch  2\n" in result.stdout
    assert "kept in" not in result.stdout
    assert result.stderr.endswith("cannot be written (no space left)\n")


def test_colours_and_a_live_line_on_a_terminal(folder: Path, nurseries: Nurseries) -> None:
    text = on_a_terminal(folder, nurseries)
    assert "\x1b[32m" in text
    assert "trial 1: micro-batch " in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")


def on_a_terminal(folder: Path, nurseries: Nurseries) -> str:
    words = ["-m", "autoaccum", "plan", "model.py", "--memory", "200MiB", "--target-batch", "1"]
    ours, theirs = pty.openpty()
    about = {"cwd": str(folder), "environment": environment(TERM="xterm-256color")}
    process = nurseries[True].copy(words, about, [theirs, theirs])
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # Linux answers EIO when the last writer has gone.
    finally:
        os.close(ours)
    assert wait(process, 120) == 0
    return b"".join(chunks).decode()


@pytest.mark.slow
def test_ctrl_c_leaves_no_orphan(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL + SLOW)
    words = [sys.executable, "-m", "autoaccum", "plan", "model.py", "--memory", "200MiB", "--target-batch", "8"]
    with subprocess.Popen(
        [*words, "--json", "-o", "plan.json"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(folder / "child")
        child = int((folder / "child").read_text())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    assert not is_running(child)
    assert sorted(path.name for path in folder.iterdir()) == ["child", "model.py"]
