"""What a trial trains on, and what its loss is measured on: never the same samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from autoaccum.errors import WorkloadError, first_line
from autoaccum.training.data.source import is_map_style
from autoaccum.workload.nests import kind
from autoaccum.workload.spec import Workload

_HELD_OUT_SHARE = 10
"""One of so many samples is held out, where the workload has no evaluation_dataset."""
_SEED = 0
_WAY_OUT = "define evaluation_dataset in the workload"
_LOADED = "write dataset = loader.dataset and collate = loader.collate_fn"


@dataclass(frozen=True)
class Split:
    """The data of a trial.

    Attributes:
        training: What is trained on.
        held_out: What losses are measured on.
        training_samples: How many are trained on; None where the data does not tell.
        words: What is held out, as `Facts.held_out`.
    """

    training: Any
    held_out: Any
    training_samples: int | None
    words: str


def split_data(workload: Workload) -> Split:
    """The workload's own `evaluation_dataset`, or a tenth of its dataset, which is the same tenth each time.

    Raises:
        WorkloadError: There is no dataset, or none that a tenth can be taken of, or it is too small.
    """
    data = workload.dataset
    if data is None:
        raise WorkloadError(
            f"{workload.name} has no dataset to train on", hint="define dataset = ... in it: samples, by index"
        )
    if workload.evaluation_dataset is not None:
        return _given(data, workload.evaluation_dataset)
    if not (isinstance(data, (list, tuple)) or is_map_style(data)):
        raise WorkloadError(
            f"no samples can be held out of {kind(data)}, which does not give them by index",
            hint=_LOADED if isinstance(data, DataLoader) else _WAY_OUT,
        )
    total = _count(data)
    if total is None or total < 2:
        seen = "tells no length" if total is None else f"has {total} sample{'s' * (total != 1)}"
        raise WorkloadError(f"the dataset {seen}: none can be held out", hint=_WAY_OUT)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(_SEED)).tolist()
    held = max(1, round(total / _HELD_OUT_SHARE))
    return Split(
        training=Subset(data, sorted(order[held:])),
        held_out=Subset(data, sorted(order[:held])),
        training_samples=total - held,
        words=f"{held:,} of {total:,} samples of dataset, drawn by seed {_SEED}",
    )


def _given(data: Any, held_out: Any) -> Split:
    count = _count(held_out)
    if count == 0:
        raise WorkloadError("evaluation_dataset has no samples", hint="give some, or leave it away: a tenth of dataset")
    words = "evaluation_dataset" if count is None else f"evaluation_dataset ({count:,} samples)"
    return Split(data, held_out, _count(data), words)


def _count(data: Any) -> int | None:
    """How many samples it has; None where it does not tell, or has batches."""
    if not (isinstance(data, (list, tuple)) or is_map_style(data)):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError) as error:
        raise WorkloadError(
            f"{kind(data)} has no length ({first_line(error)})", hint="define __len__ in the dataset"
        ) from error
