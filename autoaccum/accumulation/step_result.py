"""The phases and the result of a step, who is told of them, when Ctrl-C takes effect, and warnings."""

from __future__ import annotations

import inspect
import math
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

from autoaccum.errors import NonFiniteError
from autoaccum.messages import Message

StepPhase: TypeAlias = Literal["batch", "forward", "backward", "clip", "update"]
"""`batch`: split, weight and move the batch. `clip`: unscale gradients, measure the norm, read the loss. `update`:
round summed gradients to their dtype, run the optimizer and the scheduler."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: The loss of the effective batch, as the full batch's forward would have given it: the sum of the `terms`
            that have weight. NaN when none has.
        samples: The number of samples in the effective batch.
        micro_batches: The sizes it was split into, in order; they add up to `samples`.
        grad_norm: The 2-norm of the gradients before clipping; None without `clip_norm`.
        retries: How often memory ran out and the batch was repeated, in smaller micro-batches or with one more saver.
        updated: False when no update was made: no part had weight, or the scaler found gradients that are not finite.
        terms: The terms of the loss by name; `{"loss": ...}` when it is one number.
    """

    loss: float
    samples: int
    micro_batches: tuple[int, ...]
    grad_norm: float | None
    retries: int
    updated: bool
    terms: Mapping[str, float]


def refuse_nonfinite(loss: float, norm: float | None, *, is_scaled: bool) -> None:
    """Raise NonFiniteError for a loss or a norm that is not finite.

    A scaler skips what overflowed by its own scale: with one, only a loss of NaN is refused.
    """
    seen = None
    if math.isnan(loss) or (not is_scaled and math.isinf(loss)):
        seen = f"the loss is {loss}"
    if not is_scaled and not math.isfinite(norm or 0.0):
        seen = f"the gradient's norm is {norm}"
    if seen is not None:
        raise NonFiniteError(
            f"{seen}, the update was not made",
            loss=loss,
            grad_norm=norm,
            hint="lower the learning rate, clip the gradient, or look at this batch",
        )


class StepObserver:
    """Follows the progress of a step; derive from it and override the methods you need.

    An exception that `phase` raises ends the step, which is then rolled back.
    """

    def phase(self, phase: StepPhase) -> None:
        """Called as a phase begins: `batch`, `forward` and `backward` for each part, then `clip` and `update`."""

    def part(self, index: int) -> None:
        """Called when the part `index` begins or goes on, where parts run in lock step."""

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """Called after memory ran out in `phase` and the state was restored, before a retry at `next_micro_batch`."""

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        """Called as `out_of_memory`, where no smaller micro-batch is left: the retry, and all later, have a saver."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DelayedInterrupts:
    """Delays SIGINT, and SIGTERM where Python handles it, until `deliver` or the exit; a second signal acts at once.

    Without it a KeyboardInterrupt can strike between any two bytecodes: half-way through an update, or in the
    `__exit__` of a context manager, which leaves gradients disabled or a hook registered. Only the main thread receives
    signals; in other threads this does nothing. A handler with the attribute `only_records` is left in place, since it
    raises nothing at the first signal and must see the second. It must not be nested.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: dict[int, FrameType | None] = {}

    def __enter__(self) -> DelayedInterrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {
                number: handler
                for number, handler in handlers.items()
                if callable(handler) and not getattr(handler, "only_records", False)
            }
            for number in self._handlers:
                signal.signal(number, self._delay)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._delay:
                signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Call the handlers of the signals that came meanwhile; Python's own raises KeyboardInterrupt."""
        while self._pending:
            number, frame = self._pending.popitem()
            self._handlers[number](number, frame)

    def _delay(self, number: int, frame: FrameType | None) -> None:
        if number in self._pending:
            del self._pending[number]
            self._handlers[number](number, frame)
        else:
            self._pending[number] = frame


class Progress:
    """Where a step is: an observer is told, and signals that came meanwhile are delivered.

    Attributes:
        phase: The phase of the running step, or the one in which the last step raised.
        observer: The observer, if there is one.
        interrupts: Delays Ctrl-C to where a phase or a part begins.
    """

    def __init__(self, observer: StepObserver | None) -> None:
        self.phase: StepPhase = "batch"
        self.observer, self.interrupts = observer, DelayedInterrupts()

    def begin_phase(self, phase: StepPhase) -> None:
        """Note that a phase begins."""
        self.interrupts.deliver()
        self.phase = phase
        if self.observer is not None:
            self.observer.phase(phase)

    def begin_part(self, index: int) -> None:
        """Note that a part begins or goes on, where parts run in lock step."""
        self.interrupts.deliver()
        if self.observer is not None:
            self.observer.part(index)


class AccumulationWarning(UserWarning):
    """A warning that accumulation differs from the full batch here, given once for each Accumulator.

    Attributes:
        message: Its code and facts.
    """

    def __init__(self, message: Message) -> None:
        super().__init__(str(message))
        self.message = message


class WeightingWarning(AccumulationWarning):
    """A warning that the parts' weights probably differ from the number that the loss divides by."""


def warn_caller(message: Message, category: type[AccumulationWarning] = AccumulationWarning) -> None:
    """Warn at the nearest frame outside this package, so that Python's warning filters see the caller's line."""
    level, frame = 1, inspect.currentframe()
    # A context manager of this package is left through contextlib.
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("autoaccum", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(category(message), stacklevel=level)
