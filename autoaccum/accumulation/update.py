"""The optimizer's step, which mutates as it goes: guarded the first time, provided for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autoaccum.accumulation.reservation import Block, TemporariesRecorder, reserve
from autoaccum.accumulation.transaction import Transaction
from autoaccum.errors import UpdateInterrupted


class Updater:
    """Runs the update of one optimizer, its scaler and its scheduler.

    The first update is guarded by a host copy of parameters and optimizer state, and its temporaries are recorded;
    later ones allocate those and free them first, so that `optimizer.step()` finds its memory. The guard returns
    when the parameters with gradients, the parameter groups, or the amount of optimizer state change.
    """

    def __init__(self, optimizer: Optimizer, scaler: GradScaler | None, scheduler: LRScheduler | None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scheduler = scheduler
        self._seen: Any = None
        self._temporaries: list[Block] = []
        self._interrupted = False

    def check(self) -> None:
        """Refuse to go on with half an update.

        Raises:
            UpdateInterrupted: An unguarded update failed before.
        """
        if self._interrupted:
            raise UpdateInterrupted(
                "an earlier update was interrupted half-way, the parameters are neither the old nor the new ones",
                hint="load a checkpoint and make a new Accumulator",
            )

    @property
    def is_interrupted(self) -> bool:
        """Whether half an update was made."""
        return self._interrupted

    def interrupt(self) -> None:
        """Refuse every later update: the state is no longer known."""
        self._interrupted = True

    def run(self, transaction: Transaction) -> bool:
        """Update once; False when the scaler found gradients that are not finite and skipped the update.

        What a scheduler raises after an update that was not guarded comes as it is: that update was made.

        Raises:
            UpdateInterrupted: It failed half-way, and was not guarded.
        """
        if self._signature() != self._seen:
            return self._run_guarded(transaction)
        reserve(self._temporaries)
        try:
            updated = self._step(transaction.scale)
            transaction.commit()
        except BaseException as error:
            self.interrupt()
            if isinstance(error, Exception):
                raise UpdateInterrupted(
                    f"{type(error).__name__} within the update, which was not guarded: the parameters are neither the"
                    " old nor the new ones",
                    hint="load a checkpoint and make a new Accumulator",
                ) from error
            raise
        self._schedule(updated)
        return updated

    def _run_guarded(self, transaction: Transaction) -> bool:
        transaction.guard(self._optimizer, self._scheduler)
        with TemporariesRecorder() as recorder:
            updated = self._step(transaction.scale)
            self._schedule(updated)
        transaction.commit()
        # A skipped update has shown neither its state nor its temporaries.
        self._seen = self._signature() if updated else None
        self._temporaries = recorder.largest_set()
        return updated

    def _step(self, scale: float) -> bool:
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            if self._scaler.get_scale() < scale:
                return False
        return True

    def _schedule(self, updated: bool) -> None:
        if updated and self._scheduler is not None:
            self._scheduler.step()

    def _signature(self) -> Any:
        groups = [
            (
                [(id(parameter), parameter.grad is not None) for parameter in group["params"]],
                [(name, bool(value)) for name, value in group.items() if _is_setting(value)],
            )
            for group in self._optimizer.param_groups
        ]
        return groups, len(self._optimizer.state)


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def optimizer_parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    """Every parameter `optimizer` holds."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
