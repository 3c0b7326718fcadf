"""What a training came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autoaccum.planning.records import Plan


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, simple form), in samples.

    Attributes:
        value: The estimate; None where it is unavailable.
        low: The lower end of its spread (about 90 %); None where it is not bounded.
        high: The upper end; None where it is not bounded.
        updates: How many updates it is taken from.
        reason: Why it is unavailable; None where it is there.
    """

    value: float | None
    low: float | None
    high: float | None
    updates: int
    reason: str | None = None


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
        shortages: How often an update was repeated because memory ran out.
        skipped: Updates passed over because loss or gradient were not finite.
        seconds: What this call took, planning included.
        stopped: Why it ended before its epochs and steps: `callback`; None when it did not.
        noise_scale: Its estimate; None when it was not asked for.
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
    shortages: int = 0
    skipped: int = 0
    seconds: float = 0.0
    stopped: Literal["callback"] | None = None
    noise_scale: NoiseScale | None = None
    run_dir: Path | None = None
    checkpoint: Path | None = None
    model_path: Path | None = None
    ema_model: nn.Module | None = None
    ema_path: Path | None = None
    unsaved: str | None = None
    resumed_from: Path | None = None
    warnings: tuple[str, ...] = ()
