"""A Trainer of Lightning that prints and writes nothing, accelerate without a past, and how far weights are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def quiet_trainer(package: Any, folder: Path, **settings: Any) -> Any:
    """A Trainer of `lightning.pytorch` or `pytorch_lightning` on the CPU."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return package.Trainer(**{**quiet, "accelerator": "cpu", "devices": 1, "default_root_dir": folder, **settings})


def forget_accelerate() -> None:
    """Take back what Trainers and Accelerators of other tests left, such as a window that is not over."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def largest_difference(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of two entries, as a share of the largest one that is expected."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest
