"""The arguments of `autoaccum.fit`, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.packing import check_target
from autoaccum.checks import check_flag, check_word, is_positive, read_count
from autoaccum.errors import UsageError
from autoaccum.options import CHECKS, Options

if TYPE_CHECKING:
    from autoaccum.planning.plan_record import Plan

_FUNCTIONS = {
    "collate": "a list of samples",
    "evaluate": "the model and a batch",
    "eval_due": "the samples trained on so far",
}


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The arguments of `autoaccum.fit`, which documents each.

    Attributes:
        options: Optimizer, precision, device, memory and the like.
        eval_due: A function used in place of `eval_every`, and not an argument of `fit`. It is called after each update
            with the samples trained on so far; if it returns True, an evaluation follows. There is always one at the
            end.
        micro_tokens: The token budget beside `micro_batch`, in place of a plan's, and not an argument of `fit`.

    Raises:
        UsageError: An argument is invalid, or two contradict each other.
    """

    model_or_workload: Any
    data: Any = None
    target_batch: int | None = None
    target_tokens: int | None = None
    loss: Any = None
    criterion: Any = None
    outputs: Callable[[Any, Any], Any] | None = None
    coupled_loss: Callable[[Any, Any], Any] | None = None
    weight: Callable[[Any], Any] | None = None
    reduction: str = "mean"
    split: Callable[[Any, list[int]], Any] | None = None
    size: Callable[[Any], int] | None = None
    epochs: int | None = None
    steps: int | None = None
    plan: Plan | str | Path | None = None
    micro_batch: int | None = None
    micro_tokens: int | None = None
    options: Options = Options()
    ema_decay: float | None = None
    clip_norm: float | None = None
    learning_rate: float | None = None
    scheduler: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    eval_data: Any = None
    eval_every: int | None = None
    eval_due: Callable[[int], bool] | None = None
    evaluate: Callable[..., Any] | None = None
    run_dir: str | Path | None = None
    resume: str = "auto"
    checkpoint_every: int = 100
    max_checkpoints: int = 3
    seed: int = 0
    workers: int = 0
    skip_nonfinite: bool = False
    check: str = "warn"
    callbacks: Sequence[Callable[[Any], Any]] = ()

    @classmethod
    def of(cls, model_or_workload: Any, given: Mapping[str, Any]) -> FitRequest:
        """Return the request for a call of `fit` with these arguments, including those of `Options`.

        Raises:
            TypeError: There is no such argument.
            UsageError: As for `FitRequest`.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"options"}
        options = Options.of("fit", {name: value for name, value in given.items() if name not in names})
        others = {name: value for name, value in given.items() if name in names}
        return cls(model_or_workload=model_or_workload, options=options, **others)

    def __post_init__(self) -> None:
        counts = {"checkpoint_every": 1, "max_checkpoints": 1, "seed": 0, "workers": 0}
        counts |= dict.fromkeys(("target_batch", "target_tokens", "epochs", "steps", "micro_batch", "eval_every"), 1)
        for name, least in counts.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read_count(getattr(self, name), name, least=least))
        for name, takes in _FUNCTIONS.items():
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint=f"give a function of {takes}")
        check_flag(self.skip_nonfinite, "skip_nonfinite")
        for name, most in (
            ("clip_norm", math.inf),
            ("learning_rate", sys.float_info.max),
            ("ema_decay", math.nextafter(1.0, 0.0)),
        ):
            value = getattr(self, name)
            if value is not None and not (is_positive(value) and value <= most):
                below = " and below 1" if name == "ema_decay" else ""
                raise UsageError(f"{name} is {value!r}", hint=f"give a number above 0{below}")
        self._make_paths_absolute()
        self._take_target()
        check_target(self.target_batch, self.target_tokens)
        if self.epochs is None and self.steps is None:
            raise UsageError("neither epochs nor steps are given", hint="give epochs=3 (--epochs 3), or steps=1000")
        for first, second in (("eval_every", "eval_due"), ("micro_batch", "plan")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise UsageError(
                    f"{first} is {getattr(self, first)}, and {second} is given too", hint="give one of them"
                )
        if self.options.chooses_savers and not (self.micro_batch is None and self.plan is None):
            raise UsageError(
                "savers are to be chosen (--savers auto), and a plan or a micro-batch is given",
                hint="leave one of them out: a plan has the savers it was made with",
            )
        check_word(self.check, "check", CHECKS)
        check_word(self.resume, "way to resume", ("auto", "must", "never"))
        if self.resume == "must" and self.run_dir is None:
            raise UsageError('resume is "must", and there is no run_dir', hint="name the folder of the run to resume")
        if not isinstance(self.callbacks, Sequence) or not all(map(callable, self.callbacks)):
            raise UsageError(f"callbacks are {self.callbacks!r}", hint="give functions of one argument, in a list")

    def _take_target(self) -> None:
        """Train with the updates of a plan if no others are asked for."""
        if self.plan is None or not (self.target_batch is self.target_tokens is self.micro_batch is None):
            return
        for name, count in load_plan(self.plan).update.items():
            object.__setattr__(self, name, count)

    def _make_paths_absolute(self) -> None:
        """Make paths absolute, since loading a workload may change the working directory."""
        for name, what in (("run_dir", "a folder"), ("plan", "a plan")):
            value = getattr(self, name)
            if isinstance(value, (str, os.PathLike)) and str(value):
                object.__setattr__(self, name, Path(value).absolute())
            elif value == "" or (name == "run_dir" and value is not None):
                raise UsageError(f"{name} is {value!r}", hint=f"give the name of {what}")


def load_plan(given: Any) -> Plan:
    """Return the plan that was given, or whose file was."""
    from autoaccum.planning.plan_record import Plan

    plan = Plan.load(Path(given)) if isinstance(given, str | Path) else given
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, or the file of one: "plan.json"')
    return plan
