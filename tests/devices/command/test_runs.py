"""Runs of a command: what they leave behind, what they refuse, and the processes that they enter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from command_line import Command, autoaccum, environment, wait_for

SCRIPTS = Path(__file__).parent / "scripts"
SIZES = ("--batch-size={micro_batch}", "--accum={iter_size}")
ON_CPU = ("--device", "cpu", "--memory", "200MiB")


def plan_words(script: str, *flags: str) -> list[str]:
    """The words that plan a script."""
    return ["plan", "--target-batch", "8", "-q", *flags, "--", sys.executable, script, *SIZES]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], folder: Path) -> None:
    for _ in range(300):
        if not any(map(is_alive, pids)) and not list(folder.glob("*-*")):  # Of autoaccum and of the script.
            return
        time.sleep(0.1)
    raise AssertionError(f"left: {[pid for pid in pids if is_alive(pid)]}, {list(folder.iterdir())}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_and_no_file_is_left_when_planning_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    words = [sys.executable, "-m", "autoaccum", *plan_words("hangs.py", *ON_CPU), f"--pids={file}"]
    process = subprocess.Popen(words, cwd=SCRIPTS, env=environment(TMPDIR=str(tmp_path)))
    wait_for(file)
    pids = [int(pid) for pid in file.read_text().split()]
    assert list(tmp_path.glob("autoaccum-*"))
    process.send_signal(number)
    process.wait(30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]
    wait_until_gone(pids, tmp_path)


def test_a_script_that_hangs_is_ended_after_the_limit_on_its_time(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    done = autoaccum(
        SCRIPTS, *plan_words("hangs.py", *ON_CPU, "--trial-limit", "15"), f"--pids={pids}", TMPDIR=str(tmp_path)
    )
    assert done.returncode == 3
    assert "took longer than the limit on time, and was ended (it made 2 updates)" in done.stderr
    wait_until_gone([int(pid) for pid in pids.read_text().split()], tmp_path)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("fails.py", 2, ["KeyError: 'sample 4'", "in read_annotations", "error: micro-batch 2 raised KeyError"]),
        ("no_update.py", 3, ["it made 0 updates and 2 backward passes"]),
        ("no_optimizer.py", 3, ["the script made 20 backward passes without an optimizer: let it update"]),
        ("wrong_flag_ignored.py", 2, ["one update per backward pass, not per 2: it ignores --accum"]),
        ("not_there.py", 2, ["not_there.py", "the command left with exit status 2"]),
    ],
)
def test_a_script_that_cannot_be_planned_is_told_why(script: str, code: int, said: list[str], command: Command) -> None:
    # On a simulated card a script is a copy of a process: Python itself says that there is no such file.
    where = ON_CPU if script in ("not_there.py", "no_optimizer.py") else ("--gpu", "rtx3090")
    done = command(SCRIPTS, *plan_words(script, *where))
    assert done.returncode == code, done.stderr
    assert [text for text in said if text not in done.stderr] == []
    assert "autoaccum/devices" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "no-such-program",
            "`no-such-program` cannot be run (No such file or directory): the first word after -- must",
        ),
        ("right.py", "right.py is a script, and no program: write python right.py"),
        ("--trial-limit=9 python right.py", "--trial-limit stands after --, and so belongs to your command: move it"),
        (
            f"env PYTHONPATH=. {sys.executable} right.py",
            "the command sets PYTHONPATH to '.', and autoaccum enters its processes through it",
        ),
    ],
)
def test_a_command_that_is_no_program_is_told(words: str, told: str, command: Command) -> None:
    done = command(SCRIPTS, "plan", "--gpu", "rtx3090", "-q", "--", *words.split(), "{micro_batch}")
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


def test_a_script_that_stays_on_the_cpu_is_told_on_a_simulated_card(command: Command) -> None:
    words = [sys.executable, "right.py", "--device=cpu", "--batch-size={micro_batch}"]
    done = command(SCRIPTS, "plan", "--gpu", "rtx3090", "-q", "--", *words)
    assert done.returncode == 2, done.stderr
    assert "the script puts nothing on the simulated rtx3090: let it train on cuda" in done.stderr


def test_the_hook_enters_another_environment_and_runs_its_own_sitecustomize(tmp_path: Path, command: Command) -> None:
    """An environment that has torch and not autoaccum, as behind `uv run`."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/*/site-packages")
    (packages / "torch.pth").write_text(
        next(entry for entry in sys.path if Path(entry, "torch", "__init__.py").exists())
    )
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = '1'\n")
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\n"
        "assert os.environ['CUSTOMIZED']\n"
        "model = torch.nn.Linear(8, 1).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n"
        "    model(torch.ones(int(sys.argv[1]), 8).cuda()).mean().backward()\n"
        "    optimizer.step()\n"
    )
    words = ["plan", "--gpu", "rtx3090", "--max-micro-batch", "4", "--json", "--"]
    python = str(tmp_path / "env" / "bin" / "python")
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    done = command(tmp_path, *words, python, "train.py", "{micro_batch}", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert '"micro_batch": 4' in done.stdout
