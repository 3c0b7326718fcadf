"""autoaccum beside Lightning's BatchSizeFinder and accelerate's find_executable_batch_size, on the CPU.

    pip install -e ".[bench]"
    python tests/benchmarks/peers.py

Every contender gets the same models, the same budget of memory, the same target batch and a process of its own, with
the same settings of malloc and threads. It is held to its budget as autoaccum's trials are: RLIMIT_DATA at VmData
after a warm-up, plus the budget. `trials` are the sizes it tried. `seconds until known` is what a user waits from the
start of Python on, imports included: for autoaccum until `autoaccum.plan` returns, with the start of all its own
processes, for Lightning until `scale_batch_size` returns, for accelerate until the first of its attempts, which are
training runs, has made its second update. `trains`: whether that size then makes the updates in a fresh process under
the same limit, accumulating to the target as each one's documentation has it. `samples per update` is counted by hooks
on model and optimizer.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
from measuring import environment, format_markdown
from peer_child import Done, Task

from autoaccum.devices.child.process import child_environment
from autoaccum.units import MIB, format_bytes

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Setting:
    """What every contender is given with a model.

    Attributes:
        budget_bytes: A little less than half of the target batch fits.
        target: Samples per update.
        updates: How many a training run makes.
    """

    budget_bytes: int
    target: int
    updates: int


MODELS = {
    "conv_net": Setting(192 * MIB, 80, 20),
    "transformer": Setting(192 * MIB, 80, 20),
    "resnet50": Setting(1024 * MIB, 36, 5),
    "bert_base": Setting(2252 * MIB, 24, 3),
}
CONTENDERS = ("autoaccum", "Lightning", "accelerate")
HEADER = (
    *("model", "contender", "trials", "seconds until known", "chosen size"),
    *("trains", "micro-batches", "samples per update"),
)
_LIMIT_SECONDS = 600.0
_MOST_TEXT = 70


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender on one model.

    Attributes:
        model: Its name.
        task: The search that was asked for.
        search: What came of it.
        training: With the size that was found.
    """

    model: str
    task: Task
    search: Done
    training: Done | None = None

    @property
    def trained_size(self) -> int:
        """The size it named, if that made all its updates; otherwise 0."""
        return self.search.size or 0 if self.made_all(self.training) else 0

    def made_all(self, run: Done | None) -> bool:
        """Return whether a training run finished."""
        return run is not None and run.failure is None and len(run.micro_batches) == self.task.updates

    @property
    def samples(self) -> list[int]:
        """Samples in each update."""
        return [] if self.training is None else [sum(parts) for parts in self.training.micro_batches]

    @property
    def exact(self) -> bool:
        """True if every update had the requested number of samples."""
        return set(self.samples) == {self.task.target}

    @property
    def total_seconds(self) -> float:
        """The seconds that a user waits."""
        return self.search.start_seconds + self.search.seconds


def main() -> None:
    """Run everything, and print the table."""
    options = parse_options()
    missing = [package for package in ("lightning", "accelerate", "transformers") if find_spec(package) is None]
    if missing:
        print(f"{', '.join(missing)} not installed: pip install -e '.[bench]'", file=sys.stderr)
        sys.exit(2)
    results: list[Result] = []
    for model in options.model or MODELS:
        setting = MODELS[model]
        for contender in CONTENDERS:
            print(f"{model}: {contender} …", file=sys.stderr)
            task = Task(
                contender=contender,
                workload=str(FOLDER / "models" / f"{model}.py"),
                budget_bytes=setting.budget_bytes,
                target=setting.target,
                updates=setting.updates,
            )
            results.append(compete(task, model))
    print(f"`python {shlex.join(sys.argv)}`", end="\n\n")
    print(format_table(results), end="\n\n")
    given = {result.model: f"{result.task.target} in {format_bytes(result.task.budget_bytes)}" for result in results}
    print(f"- target batch and budget: {', '.join(f'{model} {asked}' for model, asked in given.items())}; ", end="")
    print(f"torch {version('torch')}, Python {platform.python_version()}")
    for sentence in verdicts(results):
        print(f"- {sentence}")


def parse_options() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="one of them only; may be repeated")
    return parser.parse_args()


def compete(task: Task, model: str) -> Result:
    """Search, then train with what was found."""
    search = run_child(task)
    training = None if search.size is None else run_child(replace(task, size=search.size))
    return Result(model=model, task=task, search=search, training=training)


def run_child(task: Task) -> Done:
    """Run a task in a fresh process, with the malloc settings of a trial, and return its result.

    autoaccum's own search has what a user has, since it starts its own trials.
    """
    plans = task.contender == "autoaccum" and task.size is None
    settings = {**({} if plans else child_environment()), "PYTHONPATH": environment()["PYTHONPATH"]}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        asked = msgspec.json.encode(replace(task, started=time.monotonic())).decode()
        command = [sys.executable, str(FOLDER / "peer_child.py"), str(answer), asked]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env={**environment(), **settings},
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Done(failure=f"not done after {_LIMIT_SECONDS:g} s")
        if done.returncode == 0:
            return msgspec.json.decode(answer.read_bytes(), type=Done)
    lines = done.stderr.strip().splitlines()
    return Done(failure=f"exit status {done.returncode}: {lines[-1] if lines else 'no message'}")


def format_table(results: Sequence[Result]) -> str:
    """One row for each result."""
    return format_markdown([HEADER, *(_row(result) for result in results)])


def format_parts(parts: Sequence[int]) -> str:
    """Micro-batches of one update.

    >>> format_parts([34, 31, 31]), format_parts([32, 32, 32]), format_parts([])
    ('34 + 31 + 31', '3 x 32', '-')
    """
    if len(parts) > 2 and len(set(parts)) == 1:
        return f"{len(parts)} x {parts[0]}"
    return " + ".join(map(str, parts)) or "-"


def verdicts(results: Sequence[Result]) -> list[str]:
    """For each model: does autoaccum need the fewest micro-batches for the target, exactly, in the least time?"""
    models = dict.fromkeys(result.model for result in results)
    return [_verdict(model, [result for result in results if result.model == model]) for model in models]


def _verdict(model: str, results: Sequence[Result]) -> str:
    own = next((result for result in results if result.task.contender == "autoaccum"), None)
    peers = [result for result in results if result is not own and result.search.size is not None]
    if own is None or own.search.size is None or not peers:
        return f"{model}: nothing to compare"
    target = own.task.target
    parts = {result.task.contender: math.ceil(target / max(result.trained_size, 1)) for result in (own, *peers)}
    fastest = min(peers, key=lambda peer: peer.total_seconds)
    share = own.total_seconds / fastest.total_seconds
    return (
        f"{model}: fewest micro-batches for {target} samples: {_yes(parts['autoaccum'] == min(parts.values()))}; exact "
        f"effective batch: {_yes(own.exact)}; {share:.2f} of the time of {fastest.task.contender}, the fastest peer"
    )


def _row(result: Result) -> tuple[str, ...]:
    search, training = result.search, result.training
    seconds = f"{result.total_seconds:.1f} ({search.start_seconds:.1f} of them imports)"
    name = f"{result.task.contender} {search.version}".strip()
    known = (result.model, name, str(len(search.attempts)), seconds)
    if search.size is None or training is None:
        return (*known, f"failed: {_short(search.failure)}", "-", "-", "-")
    samples = " to ".join(map(str, sorted({min(result.samples), max(result.samples)}))) if result.samples else "-"
    return (
        *known,
        str(search.size),
        _trains(result, training),
        format_parts(training.micro_batches[0] if training.micro_batches else ()),
        samples + ("" if result.exact else f" (asked: {result.task.target})"),
    )


def _trains(result: Result, run: Done) -> str:
    if result.made_all(run):
        return f"yes, {result.task.updates} updates"
    return f"no, after {len(run.micro_batches)} updates: {_short(run.failure)}"


def _short(text: str | None) -> str:
    line = " ".join((text or "no message").replace("|", "/").split())
    return line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 1] + "…"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


if __name__ == "__main__":
    main()
