"""What training tells while it goes on and in the end: frozen records, for whoever draws or logs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autoaccum.planning.plan import Plan


@dataclass(frozen=True)
class Planning:
    """A plan is made first; the planner's own events follow, until `Started`."""

    reference: str


@dataclass(frozen=True)
class WorkloadOutput:
    """A line that the workload printed in a process of its own, while it was planned."""

    line: str


@dataclass(frozen=True, kw_only=True)
class Started:
    """The first update comes next.

    Attributes:
        model: The model, on its device.
        optimizer: Its optimizer.
        plan: What the micro-batch was taken from; None where it was given as a number.
        micro_batch: The ceiling to begin with, in samples.
        target_batch: Samples per update.
        device: Where it trains: `cpu`, `cuda:0`.
        update: Updates made before, by an earlier run in the same folder.
        updates: Updates there will be in all; None where the data does not tell.
        epochs: Epochs there will be in all; None where only updates count.
        resumed_from: The checkpoint that training goes on from; None for a new run.
    """

    model: nn.Module
    optimizer: Optimizer
    plan: Plan | None
    micro_batch: int
    target_batch: int
    device: str
    update: int = 0
    updates: int | None = None
    epochs: int | None = None
    resumed_from: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Updated:
    """One update; also a line of `metrics.jsonl`.

    Attributes:
        update: Counted from 1; windows that were skipped count, so that the number tells the place in the data.
        epoch: Counted from 1.
        samples: Samples trained on so far, over all epochs.
        loss: The loss of the effective batch; NaN when nothing in it had weight.
        grad_norm: 2-norm of its gradient before clipping; None where there was none.
        learning_rate: Of the first parameter group, in this update; None where it has none.
        samples_per_second: Of this update, with the data it waited for.
        peak_bytes: On a card the most PyTorch's allocator reserved during the update; on the CPU the most memory the
            process has held so far; None where that is not known.
        micro_batches: How many the batch was cut into.
        micro_batch: The largest of them, in samples.
        retries: How often it was repeated in smaller micro-batches, because memory ran out.
        updated: False when the weights stayed: nothing had weight, the scaler found gradients not finite, or the
            window was skipped for that.
        terms: The terms of the loss by name, where there are several.
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


@dataclass(frozen=True)
class OutOfMemoryRetry:
    """Memory ran out in an update: nothing was changed, and its batch is repeated in smaller micro-batches.

    Attributes:
        update: Which one.
        phase: Where in the step.
        micro_batch: The largest part that was tried, in samples.
        next_micro_batch: The most that is tried next.
    """

    update: int
    phase: str
    micro_batch: int
    next_micro_batch: int


@dataclass(frozen=True)
class CeilingRaised:
    """After a calm stretch, larger micro-batches are tried again, from the next update on."""

    update: int
    micro_batch: int


@dataclass(frozen=True)
class EpochEnded:
    """All of the data was seen once more; `epoch` is counted from 1, `samples` are those of this epoch."""

    epoch: int
    update: int
    samples: int


@dataclass(frozen=True)
class Evaluated:
    """An evaluation is done.

    Attributes:
        update: After which update.
        values: By name: `loss`, or what the workload's own `evaluate` returned, averaged over samples; the same of the
            averaged weights, where they are kept, as `ema_loss`.
        samples: Samples it went over.
        seconds: What it took.
    """

    update: int
    values: Mapping[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True)
class EvaluationFailed:
    """An evaluation could not be finished; training goes on.

    Attributes:
        update: After which update.
        reason: Why, for a person.
        out_of_memory: Not even one sample at a time fits.
    """

    update: int
    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is on disk, whole and read back."""

    update: int
    path: Path
    seconds: float


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; the earlier ones are as they were, and training goes on."""

    update: int
    reason: str


@dataclass(frozen=True)
class Skipped:
    """The loss or the gradient of an update was not finite: its window is passed over, the weights stay."""

    update: int
    reason: str


@dataclass(frozen=True)
class Notice:
    """What a person should know, as a sentence: a damaged checkpoint was passed over, data is read forward."""

    text: str
    warns: bool = True


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a training came to.

    Attributes:
        model: The trained model, on its device.
        optimizer: Its optimizer.
        plan: The plan it was trained by; None where `micro_batch` was given.
        updates: Updates so far, those of earlier runs in the same folder included.
        epochs: Whole epochs so far.
        samples: Samples trained on so far.
        loss: Of the last update; None when this call made none.
        evaluation: What the last evaluation gave, by name; None when there was none.
        oom_retries: How often an update was repeated because memory ran out.
        skipped: Updates passed over because loss or gradient were not finite.
        seconds: What this call took, planning included.
        stopped: Why it ended before its epochs and steps: `callback`; None when it did not.
        run_dir: The folder of the run; None without one.
        checkpoint: The newest checkpoint; None without a folder.
        model_path: The weights as a plain `state_dict`; None without a folder, or where they could not be written.
        ema_model: A copy of the model whose weights are the averages; None where none are kept.
        ema_path: Those, as `model_path`.
        unsaved: Why the end of this training is not on disk although there is a folder; None when it is.
        resumed_from: The checkpoint it went on from.
        warnings: What went wrong on the way without ending it, as sentences.
    """

    model: nn.Module
    optimizer: Optimizer
    plan: Plan | None
    updates: int
    epochs: int
    samples: int
    loss: float | None
    evaluation: Mapping[str, float] | None = None
    oom_retries: int = 0
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
    warnings: tuple[str, ...] = ()


class EventNotifier:
    """Passes every event on: to listeners of our own, then to the user's callbacks.

    Args:
        listeners: Hear everything; what they return does not matter.
        callbacks: Hear everything, too; one that returns True ends the training after this update.

    Attributes:
        ended: Whether a callback said so.
        warnings: What went wrong without ending the training, as sentences.
    """

    def __init__(self, listeners: Sequence[Callable[[Any], Any]], callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self.ended = False
        self.warnings: list[str] = []
        self.listeners, self._callbacks = list(listeners), list(callbacks)

    def tell(self, event: Any) -> None:
        """Pass an event on. What a callback raises comes as it is, after all listeners have heard."""
        said = _warning(event)
        if said is not None and said not in self.warnings:
            self.warnings.append(said)
        for listener in self.listeners:
            listener(event)
        for callback in self._callbacks:
            if callback(event) is True:
                self.ended = True


def _warning(event: Any) -> str | None:
    if isinstance(event, Notice):
        return event.text if event.warns else None
    if isinstance(event, EvaluationFailed):
        return f"the evaluation after update {event.update} failed: {event.reason}"
    if isinstance(event, CheckpointFailed):
        return f"no checkpoint was written after update {event.update}: {event.reason}"
    return None
