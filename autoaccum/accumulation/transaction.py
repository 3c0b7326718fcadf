"""All or nothing: what a step may change, as it was before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler

from autoaccum.accumulation.copies import ModuleState, StateCopy
from autoaccum.accumulation.gradients import rewind_scaler
from autoaccum.accumulation.randomness import Generator, RandomState
from autoaccum.units import MIB

_SMALL_BYTES = MIB
"""Buffers up to this size are copied on their own device, where a copy costs no synchronisation; larger ones to the
host, so that a step needs no device memory for them."""


class Transaction:
    """The state of a training step from before it.

    Covers buffers (mutated or replaced), train/eval modes, `requires_grad`, `.grad`, random states and the scaler;
    from `guard` on also what is passed there, which is only copied for the first update. Parameters change nowhere
    else. State that a model keeps in Python attributes is not covered: see `attributes`.

    Args:
        modules: Every module of the model, and of the criterion.
        parameters: Every parameter whose `.grad` the step touches.
        generators: Generators the modules own.
        scaler: The scaler, unless there is none.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[Tensor],
        *,
        generators: Iterable[Generator] = (),
        scaler: GradScaler | None = None,
    ) -> None:
        self._modules: ModuleState | None = ModuleState(modules, host_bytes=_SMALL_BYTES)
        self._gradients = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
        devices = dict.fromkeys(tensor.device for tensor in (*parameters, *self._modules.buffers))
        self._random = RandomState(devices, generators)
        self._scaler = scaler
        self._scaler_state: dict[str, Any] = {} if scaler is None else scaler.state_dict()
        self._guarded: StateCopy | None = None

    @property
    def scale(self) -> float:
        """The loss scale before the step; 1.0 without a scaler."""
        return float(self._scaler_state.get("scale", 1.0))

    def guard(self, *owners: Any) -> None:
        """Copy the parameters and the state that `owners` (optimizer, scheduler) hold to host memory."""
        self._guarded = StateCopy([getattr(owner, "__dict__", None) for owner in owners], on_host=True)

    def commit(self) -> None:
        """Free the copies: the update was made, and from now on `rollback` does nothing."""
        self._guarded = self._modules = None

    def rollback(self) -> None:
        """Put everything back; allocates no device memory, and may be called again when it was interrupted."""
        if self._modules is None:
            return
        if self._guarded is not None:
            self._guarded.restore()
        self._modules.restore()
        for parameter, requires_grad, gradient in self._gradients:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        if self._scaler is not None:
            rewind_scaler(self._scaler, self._scaler_state)
        self._random.restore()
