"""Events and the result of a training, as frozen records for progress displays and logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoaccum.messages import Message

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autoaccum.planning.plan_record import Plan


@dataclass(frozen=True)
class WorkloadOutput:
    """A line that the workload printed in its child process during planning."""

    line: str


@dataclass(frozen=True, kw_only=True)
class Started:
    """The training is about to make its first update.

    Attributes:
        plan: The plan with the micro-batch; None if the micro-batch was given as a number.
        micro_batch: The most samples of a micro-batch at the start; by tokens, what always fits of the longest.
        update: Updates already made by earlier runs in the same folder.
        updates: Total updates at the end; None if the data has no known length.
        epochs: Total epochs at the end; None if only updates count.
        resumed_from: The checkpoint that training resumes from; None for a new run.
        target_tokens: The tokens of an update, in place of `target_batch` samples.
        micro_tokens: The most padded tokens of a micro-batch at the start; None if samples are counted.
    """

    model: nn.Module
    optimizer: Optimizer
    plan: Plan | None
    micro_batch: int
    target_batch: int | None
    device: str
    update: int = 0
    updates: int | None = None
    epochs: int | None = None
    resumed_from: Path | None = None
    target_tokens: int | None = None
    micro_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Updated:
    """One update; also a line of `metrics.jsonl`.

    Attributes:
        update: The number of the update, from 1. Skipped windows count, so it gives the position in the data.
        epoch: The number of the epoch, from 1.
        samples: Samples trained on so far, over all epochs.
        loss: The loss of the effective batch; NaN if nothing in it had weight.
        grad_norm: The 2-norm of the gradient before clipping; None if there was no gradient.
        learning_rate: That of the first parameter group; None if it has none.
        samples_per_second: Including the wait for data.
        peak_bytes: On a GPU the most that PyTorch's allocator reserved during the update; on the CPU the most memory
            the process has held so far; None if unknown.
        micro_batches: The number of micro-batches.
        micro_batch: The size of the largest one, in samples.
        retries: How many times the update was repeated after running out of memory.
        updated: False if the weights did not change: nothing had weight, the scaler found gradients that are not
            finite, or the window was skipped for that reason.
        terms: The terms of the loss by name, if there are several.
        savers: The savers in use, if there are any.
    """

    update: int
    epoch: int
    samples: int
    loss: float
    grad_norm: float | None
    learning_rate: float | None
    samples_per_second: float
    peak_bytes: int | None
    micro_batches: int
    micro_batch: int
    retries: int
    updated: bool
    terms: Mapping[str, float] | None = None
    savers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class EpochEnded:
    """An epoch is over; `epoch` counts from 1, and `samples` are those of this epoch."""

    epoch: int
    update: int
    samples: int


@dataclass(frozen=True)
class Evaluated:
    """An evaluation is done.

    Attributes:
        update: The number of updates made before it.
        values: Metrics by name: `loss`, or the results of the workload's `evaluate`, averaged over samples. With
            averaged weights, theirs too, as `ema_loss`.
        samples: The number of evaluated samples.
    """

    update: int
    values: Mapping[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is on disk."""

    update: int
    path: Path
    seconds: float


@dataclass(frozen=True)
class Notice:
    """A message for the user: a warning if `warns`, else a note."""

    message: Message
    warns: bool = True


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a training.

    Attributes:
        model: The trained model, on its device.
        plan: The plan it was trained by; None if `micro_batch` was given.
        micro_batch: The most samples of a micro-batch at the end; by tokens, what always fits of the longest.
        updates: Updates so far, including earlier runs in the same folder.
        epochs: Whole epochs so far.
        samples: Samples trained on so far.
        loss: The loss of the last update; None if this call made none.
        evaluation: The metrics of the last evaluation, by name; None if there was none.
        oom_retries: How many times an update was repeated after running out of memory.
        added_savers: The savers added because not even the smallest micro-batch fitted.
        skipped: Updates skipped because the loss or the gradient was not finite.
        seconds: The duration of this call, including planning.
        stopped: The reason for ending before the last epoch or step: `callback`; None otherwise.
        run_dir: The run's folder; None without one.
        checkpoint: The newest checkpoint; None without a folder.
        model_path: The weights as a plain `state_dict`; None without a folder, or if they could not be written.
        ema_model: A copy of the model with the averaged weights; None without an average.
        ema_path: The averaged weights, like `model_path`.
        unsaved: The reason why the final state is not on disk although there is a folder; None if it is.
        resumed_from: The checkpoint that training resumed from.
        warnings: Problems that did not end the training.
        micro_tokens: The most padded tokens of a micro-batch at the end; None if samples are counted.
    """

    model: nn.Module
    optimizer: Optimizer
    plan: Plan | None
    micro_batch: int
    updates: int
    epochs: int
    samples: int
    loss: float | None
    evaluation: Mapping[str, float] | None = None
    oom_retries: int = 0
    added_savers: tuple[str, ...] = ()
    skipped: int = 0
    seconds: float = 0.0
    stopped: Literal["callback"] | None = None
    run_dir: Path | None = None
    checkpoint: Path | None = None
    model_path: Path | None = None
    ema_model: nn.Module | None = None
    ema_path: Path | None = None
    unsaved: str | None = None
    resumed_from: Path | None = None
    warnings: tuple[Message, ...] = ()
    micro_tokens: int | None = None


class EventNotifier:
    """Passes every event to our own listeners, then to the user's callbacks.

    Args:
        listeners: Called with every event.
        callbacks: Called with every event. Returning True ends the training after this update.

    Attributes:
        should_stop: True once a callback has returned True.
        warnings: Problems that did not end the training.
    """

    def __init__(self, listeners: Sequence[Callable[[Any], Any]], callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self.should_stop, self.warnings = False, list[Message]()
        self.listeners, self._callbacks = list(listeners), list(callbacks)

    def notify(self, event: Any) -> None:
        """Pass an event on. A callback's exception is raised unchanged, after all listeners have been called."""
        if isinstance(event, Notice) and event.warns and event.message not in self.warnings:
            self.warnings.append(event.message)
        for listener in self.listeners:
            listener(event)
        for callback in self._callbacks:
            if callback(event) is True:
                self.should_stop = True
