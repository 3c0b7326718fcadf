"""What a contender is asked and what it answers, as one line of JSON each; no PyTorch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one child is to do.

    Attributes:
        contender: The module in this folder: `by_autoaccum`, `by_lightning`, `by_accelerate`.
        deed: The function to call in it.
        workload: Path of the workload file.
        budget_bytes: What the deed may hold above what is there before it begins.
        target: Samples an update ought to have.
        updates: How many of them a training run makes.
        size: The micro-batch to train with, in samples; None in a search.
        started: `time.monotonic()` before the child was started; the clock is the same in every process.
    """

    contender: str
    deed: str
    workload: str
    budget_bytes: int
    target: int
    updates: int
    size: int | None = None
    started: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Search:
    """How a contender found its size.

    Attributes:
        attempts: The sizes it tried, in order.
        size: The micro-batch its user trains with; None when there is none.
        largest: The largest size it says fits: `size`, unless the target was divided evenly.
        start_seconds: Start of the interpreter and imports.
        seconds: From then until the size was known.
        useful_seconds: Those of them that were training for real already.
        failure: What it failed with.
        version: Of the package.
        threads: PyTorch's.
    """

    attempts: tuple[int, ...] = ()
    size: int | None = None
    largest: int | None = None
    start_seconds: float = 0.0
    seconds: float = 0.0
    useful_seconds: float = 0.0
    failure: str | None = None
    version: str = ""
    threads: int | None = None

    @property
    def total_seconds(self) -> float:
        """What a user waits."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, kw_only=True)
class Training:
    """What happened when a size was trained with, in a process that had done nothing before.

    Attributes:
        micro_batches: Sizes of the micro-batches of each update, as the model saw them.
        seconds: Of all updates.
        failure: What it failed with.
    """

    micro_batches: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0
    failure: str | None = None

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples in each update."""
        return tuple(sum(parts) for parts in self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender on one model.

    Attributes:
        training: With `search.size`.
        training_largest: With `search.largest` where that is another size.
    """

    model: str
    contender: str
    target: int
    budget_bytes: int
    updates: int
    search: Search
    training: Training | None = None
    training_largest: Training | None = None

    @property
    def largest_trained(self) -> int:
        """The largest size it named that made all its updates; 0 when none did."""
        runs = ((self.search.size, self.training), (self.search.largest, self.training_largest))
        return max((size for size, run in runs if size and self.made_all(run)), default=0)

    def made_all(self, run: Training | None) -> bool:
        """Whether a training run came to its end."""
        return run is not None and run.failure is None and len(run.micro_batches) == self.updates

    @property
    def exact(self) -> bool:
        """Whether every update had the samples that were asked for."""
        return self.training is not None and set(self.training.samples) == {self.target}


def write_answer(path: Path, answer: Search | Training) -> None:
    """Write it whole or not at all, so that a child that is ended leaves no half answer."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(answer)), encoding="utf-8")
    draft.replace(path)


def read_search(text: str) -> Search:
    """Parse what `write_answer` wrote of a Search."""
    fields: Mapping[str, Any] = json.loads(text)
    return Search(**{**fields, "attempts": tuple(fields["attempts"])})


def read_training(text: str) -> Training:
    """Parse what `write_answer` wrote of a Training."""
    fields: Mapping[str, Any] = json.loads(text)
    return Training(**{**fields, "micro_batches": as_tuples(fields["micro_batches"])})


def as_tuples(lists: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Lists of lists, as tuples."""
    return tuple(tuple(part) for part in lists)
