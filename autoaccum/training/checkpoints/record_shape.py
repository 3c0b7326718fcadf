"""What the record in a checkpoint must hold for a training to go on from it, told in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.errors import CheckpointError
from autoaccum.planning.shapes import ShapeError, shape
from autoaccum.training.progress import Progress


@dataclass(frozen=True)
class _Place:
    update: int
    epoch: int
    samples: int
    epoch_samples: int


@dataclass(frozen=True)
class _Ceiling:
    largest: int
    calm: int
    patience: int
    fitted: int | None


@dataclass(frozen=True)
class _Noise:
    rows: tuple[tuple[float, ...], ...]
    refused: dict[str, Any]


@dataclass(frozen=True)
class _MapPlace:
    epoch: int
    samples: int
    order: int


@dataclass(frozen=True)
class _Own:
    data: object
    rest: object


@dataclass(frozen=True)
class _StreamPlace:
    epoch: int
    windows: int
    ended: bool
    own: _Own | None


@dataclass(frozen=True)
class _Module:
    state: dict[str, Any]
    buffers: dict[str, Any]
    extra: dict[str, Any]
    tied: dict[str, Any]
    frozen: tuple[str, ...]
    evaluating: tuple[str, ...]


@dataclass(frozen=True)
class _Optimizer:
    groups: tuple[tuple[str, ...], ...]
    alone: dict[str, Any]
    state: object  # What the user's own classes keep is theirs.


@dataclass(frozen=True)
class _Scheduler:
    state: object


@dataclass(frozen=True)
class _Settings:
    groups: tuple[dict[str, Any], ...]
    schedule: dict[str, Any] | None


@dataclass(frozen=True)
class _Training:
    model: _Module
    companions: dict[str, _Module]
    optimizer: _Optimizer
    scheduler: _Scheduler | None
    scaler: dict[str, Any] | None
    settings: _Settings | None


@dataclass(frozen=True)
class _Average:
    updates: int
    model: _Module


@dataclass(frozen=True)
class _Card:
    device: str


@dataclass(frozen=True)
class _Random:
    numpy: dict[str, Any] | None
    devices: tuple[_Card, ...]
    generators: dict[str, Any]


@dataclass(frozen=True)
class _Record:
    run: dict[str, Any]
    progress: _Place
    plan: str | None
    micro_batch: int
    ceiling: _Ceiling
    noise_scale: _Noise | None
    evaluation: dict[str, int]
    data: dict[str, Any]
    training: _Training
    random: _Random
    ema: _Average | None = None


def check_record(record: Mapping[str, Any], path: Path) -> None:
    """Refuse a record that no training here can go on from; what it holds besides is of a later version, and stays.

    Raises:
        CheckpointError: Says what of the record in `path` is missing, or of another type.
    """
    try:
        shape(record, _Record)
        shape(record["progress"], Progress)
        place = record["data"]
        shape(place, _StreamPlace if "windows" in place else _MapPlace)
        for name in ("optimizer", "scheduler"):
            part = record["training"].get(name)
            # A key that no field of a dataclass can be named after.
            if part is not None and not isinstance(part.get("class"), str):
                raise ShapeError(f"in training, the class of the {name} is missing")
    except ShapeError as error:
        raise CheckpointError(
            f"{path} is whole, and holds another record than this autoaccum goes on from ({error})",
            hint="resume with the version that wrote it, or train anew in another folder",
        ) from None
