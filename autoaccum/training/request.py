"""What a training is asked to do: everything `autoaccum.fit` is given, checked before anything starts."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.units import parse_size
from autoaccum.workload.companions import read_keeps

if TYPE_CHECKING:
    from autoaccum.planning.records import Plan
    from autoaccum.units import MemorySize

Resume = Literal["auto", "never", "must"]

_FUNCTIONS = {
    "collate": "a list of samples",
    "evaluate": "the model and a batch",
    "eval_due": "the samples trained on so far",
}


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The arguments of `autoaccum.fit`, where each is explained; `subject` is its `model_or_workload`.

    Attributes:
        eval_due: In place of `eval_every`, and no argument of `fit`: asked after each update with the samples trained
            on so far; where it returns True, an evaluation comes next. Whatever it says, there is one in the end.

    Raises:
        UsageError: One of them cannot be honoured, or they contradict each other.
    """

    subject: Any
    data: Any = None
    target_batch: int
    loss: Any = None
    criterion: Any = None
    optimizer: Any = None
    weight: Callable[[Any], Any] | None = None
    reduction: str = "mean"
    split: Callable[[Any, list[int]], Any] | None = None
    size: Callable[[Any], int] | None = None
    epochs: int | None = None
    steps: int | None = None
    plan: Plan | str | Path | None = None
    micro_batch: int | None = None
    device: str = "auto"
    memory: str | MemorySize | None = None
    reserve: str | MemorySize | None = None
    precision: str | None = None
    batchnorm: str | None = None
    keeps: Any = None
    ema_decay: float | None = None
    worst_of: int | None = None
    multiple_of: int | None = None
    accumulate_in: str | None = None
    clip_norm: float | None = None
    learning_rate: float | None = None
    scheduler: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    eval_data: Any = None
    eval_every: int | None = None
    eval_due: Callable[[int], bool] | None = None
    evaluate: Callable[..., Any] | None = None
    evaluation_batch: int | None = None
    run_dir: str | Path | None = None
    resume: Resume | str = "auto"
    checkpoint_every: int = 100
    keep: int = 3
    seed: int = 0
    workers: int = 0
    skip_nonfinite: bool = False
    noise_scale: bool = False
    callbacks: Sequence[Callable[[Any], Any]] = ()

    def __post_init__(self) -> None:
        for name in ("target_batch", "checkpoint_every", "keep"):
            self._check_count(name)
        for name in ("epochs", "steps", "micro_batch", "eval_every", "evaluation_batch", "worst_of", "multiple_of"):
            if getattr(self, name) is not None:
                self._check_count(name)
        for name in ("seed", "workers"):
            self._check_count(name, least=0)
        for name, takes in _FUNCTIONS.items():
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint=f"give a function of {takes}")
        if self.eval_every is not None and self.eval_due is not None:
            raise UsageError(f"eval_every is {self.eval_every}, and eval_due is given too", hint="give one of them")
        self._settle_paths()
        for name in ("memory", "reserve"):
            if isinstance(getattr(self, name), str):
                parse_size(getattr(self, name))
        for name in ("skip_nonfinite", "noise_scale"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint="give True or False")
        if self.epochs is None and self.steps is None:
            raise UsageError(
                "neither epochs nor steps are given", hint="say how long to train: epochs=3, or steps=1000"
            )
        if self.plan is not None and self.micro_batch is not None:
            raise UsageError(f"micro_batch is {self.micro_batch}, and a plan is given too", hint="give one of them")
        if self.resume not in get_args(Resume):
            raise UsageError(
                f"resume is {self.resume!r}",
                hint='take "auto" (go on where there is a checkpoint), "must" (only that) or "never" (begin anew)',
            )
        if self.resume == "must" and self.run_dir is None:
            raise UsageError('resume is "must", and there is no run_dir', hint="name the folder of the run to resume")
        if self.clip_norm is not None and not _is_positive(self.clip_norm):
            raise UsageError(f"clip_norm is {self.clip_norm!r}", hint="give a number above 0")
        if self.learning_rate is not None:
            if not _is_positive(self.learning_rate) or math.isinf(self.learning_rate):
                raise UsageError(f"learning_rate is {self.learning_rate!r}", hint="give a finite number above 0")
            object.__setattr__(self, "learning_rate", float(self.learning_rate))
        if self.ema_decay is not None and not (_is_positive(self.ema_decay) and self.ema_decay < 1):
            raise UsageError(f"ema_decay is {self.ema_decay!r}", hint="give a number between 0 and 1, such as 0.999")
        self._settle_keeps()
        given = list(self.callbacks) if hasattr(self.callbacks, "__iter__") else [self.callbacks]
        if not all(map(callable, given)) or not hasattr(self.callbacks, "__iter__"):
            raise UsageError(f"callbacks are {self.callbacks!r}", hint="give functions of one argument, in a list")
        object.__setattr__(self, "callbacks", tuple(given))

    def _settle_keeps(self) -> None:
        try:
            object.__setattr__(self, "keeps", None if self.keeps is None else read_keeps(self.keeps))
        except WorkloadError as error:
            raise UsageError(error.message, hint=error.hint) from None

    def _settle_paths(self) -> None:
        """What is relative is so to the folder the request was made in: a workload may go to another."""
        for name, what in (("run_dir", "a folder"), ("plan", "a plan")):
            value = getattr(self, name)
            if isinstance(value, (str, os.PathLike)) and str(value):
                object.__setattr__(self, name, Path(value).absolute())
            elif value == "" or (name == "run_dir" and value is not None):
                raise UsageError(f"{name} is {value!r}", hint=f"give the name of {what}")

    def _check_count(self, name: str, *, least: int = 1) -> None:
        value = getattr(self, name)
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < least:
            raise UsageError(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")
        object.__setattr__(self, name, number)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value) and value > 0
