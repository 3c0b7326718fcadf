"""Hears the gradient of each micro-batch as it arrives, for the gradient noise scale: no backward of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from autoaccum.accumulation.gradients import HALF_DTYPES
from autoaccum.accumulation.observers import StepObserver, StepPhase, StepResult
from autoaccum.training.results import NoiseScale
from autoaccum.training.updates.noise_scale import NOT_FINITE, NoiseEstimator
from autoaccum.workload.weights import Reduction

_TERMS = "the terms of the loss have different shares in a micro-batch, whose gradient is that of no mean"
_PIECES = "a parameter's gradient comes in several pieces (reentrant checkpointing): use_reentrant=False has one"
_SKIPPED = "no update was made: nothing had weight, or the loss scaler passed it over"
_UNMEASURED = "the norm of the gradient is not measured: give the Accumulator a clip_norm, it may be infinite"


@dataclass
class _Part:
    samples: int
    share: float | None
    factor: float
    norms: dict[int, Tensor] = field(default_factory=dict)
    has_pieces: bool = False
    squares: list[Tensor] = field(default_factory=list)

    def settle(self) -> None:
        """Leave one scalar for each device of what were the norms of all parameters."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for norm in self.norms.values():
            by_device.setdefault(norm.device, []).append(norm)
        self.squares = [torch.linalg.vector_norm(torch.stack(norms)).square() for norms in by_device.values()]
        self.norms.clear()


class NoiseObserver(StepObserver):
    """Takes the squared norms of the gradients of parts, and estimates the noise scale from them.

    A hook on each parameter sees the part's own gradient before it is added to those of earlier parts: with tied
    weights, and where forward is recomputed, once and whole. Norms stay on their device until the step itself has
    read its loss; then all are read at once, when nothing is left to wait for.

    Args:
        parameters: Those of the optimizer.
        reduction: Whether the loss is a mean or a sum.
    """

    def __init__(self, parameters: Iterable[Tensor], reduction: Reduction = "mean") -> None:
        self._estimator = NoiseEstimator()
        self._reduction = reduction
        self._parts: list[_Part] = []
        self._read: list[float] = []
        self._listening = False
        self._last: StepPhase | None = None
        self._parameters = list(parameters)
        self._handles: dict[int, RemovableHandle] = {}

    def close(self) -> None:
        """Remove the hooks, for good."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._parameters.clear()

    def phase(self, phase: StepPhase) -> None:
        """See `StepObserver`. An attempt begins where two batches follow one another, whatever became of the last."""
        self._listening = False
        if phase == "batch" and self._last == "batch":
            self._parts.clear()
            self._listen()
        elif phase == "clip":
            self._settle()
        elif phase == "update":
            self._read = _read([square for part in self._parts for square in part.squares])
        self._last = phase

    def part(self, samples: int, share: float | None, factor: float) -> None:
        """See `StepObserver`."""
        self._settle()
        self._parts.append(_Part(samples, share, factor))
        self._listening = True

    def take(self, result: StepResult) -> None:
        """Take in the update that has just been made."""
        parts, read = list(self._parts), iter(self._read)
        squares = [sum((next(read) for _ in part.squares), 0.0) for part in parts]
        self._parts.clear()
        self._read = []
        reason = _refusal(parts, result)
        if reason is not None:
            self._estimator.refuse(reason)
            return
        norm = result.grad_norm
        assert norm is not None
        if not math.isfinite(norm) or not all(map(math.isfinite, squares)):
            self._estimator.refuse(NOT_FINITE)
        elif self._reduction == "mean":
            self._estimator.add(
                [(part.share or 0.0) * result.samples for part in parts],
                [square / part.factor**2 for part, square in zip(parts, squares, strict=True)],
                result.samples,
                norm**2,
            )
        else:
            self._estimator.add(
                [part.samples for part in parts],
                [square / (part.factor * part.samples) ** 2 for part, square in zip(parts, squares, strict=True)],
                result.samples,
                (norm / result.samples) ** 2,
            )

    def estimate(self) -> NoiseScale:
        """The noise scale as far as the updates so far tell."""
        return self._estimator.estimate()

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as plain values."""
        return self._estimator.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._estimator.restore(state)

    def _listen(self) -> None:
        """To every parameter that is trained now; one may be unfrozen later."""
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._handles:
                leaf: Any = parameter
                self._handles[id(parameter)] = leaf.register_hook(partial(self._hear, id(parameter)))

    def _hear(self, key: int, gradient: Tensor) -> None:
        if self._listening:
            part = self._parts[-1]
            part.has_pieces |= key in part.norms
            part.norms[key] = _norm(gradient)

    def _settle(self) -> None:
        if self._parts and self._parts[-1].norms:
            self._parts[-1].settle()


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if values.dtype in HALF_DTYPES else None)
    return norm


def _read(scalars: list[Tensor]) -> list[float]:
    if not scalars:
        return []
    device = scalars[0].device
    return [float(value) for value in torch.stack([scalar.to(device) for scalar in scalars]).tolist()]


def _refusal(parts: list[_Part], result: StepResult) -> str | None:
    if not result.updated:
        return _SKIPPED
    if result.grad_norm is None:
        return _UNMEASURED
    if any(part.share is None for part in parts):
        return _TERMS
    return _PIECES if any(part.has_pieces for part in parts) else None
