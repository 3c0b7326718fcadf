"""The parent's side: one child for each task, and what it means when there is no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from contenders.records import Result, Search, Task, Training, read_search, read_training

from autoaccum.devices.process import PACKAGE_ROOT, child_environment

BENCHMARKS = Path(__file__).resolve().parents[1]
_LIMIT_SECONDS = 600.0


def compete(task: Task, model: str) -> Result:
    """Search, then train with what was found: with the largest size too, where the plan uses a smaller one."""
    text, failure = run_child(replace(task, deed="search"))
    search = Search(failure=failure) if text is None else read_search(text)
    training = None if search.size is None else _train(replace(task, deed="train", size=search.size))
    largest = None
    if search.largest != search.size:
        largest = _train(replace(task, deed="train_largest", size=search.largest))
    return Result(
        model=model,
        contender=task.contender,
        target=task.target,
        budget_bytes=task.budget_bytes,
        updates=task.updates,
        search=search,
        training=training,
        training_largest=largest,
    )


def run_child(task: Task) -> tuple[str | None, str | None]:
    """The answer, or None and why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        asked = json.dumps(asdict(replace(task, started=time.monotonic())))
        command = [sys.executable, "-m", "contenders.child", str(answer), asked]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment(task), timeout=_LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"not done after {_LIMIT_SECONDS:g} s"
        if answer.exists():
            return answer.read_text(encoding="utf-8"), None
    lines = done.stderr.strip().splitlines()
    return None, f"exit status {done.returncode}: {lines[-1] if lines else 'no message'}"


def environment(task: Task) -> dict[str, str]:
    """What a trial of autoaccum has; for autoaccum's own search what a user has, since it starts its own trials."""
    found = dict(os.environ) if (task.contender, task.deed) == ("by_autoaccum", "search") else child_environment()
    paths = [str(BENCHMARKS), str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _train(task: Task) -> Training:
    text, failure = run_child(task)
    return Training(failure=failure) if text is None else read_training(text)
