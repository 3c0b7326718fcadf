"""Run the optimizer's update: protected by a copy the first time, with preallocated temporary memory later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoaccum.accumulation.transaction import Transaction
from autoaccum.errors import UpdateInterrupted
from autoaccum.sharded_tensors import local_part

Block = tuple[torch.device, int]
"""A device and a number of bytes on it."""


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operators create within it, and when they are freed.

    Storages are counted, not tensors, since views and in-place operators take no memory. The workspace of a single
    operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: list[Block] = []
        self._events: list[tuple[int, bool]] = []
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` and record the storages it created."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        existing = {id(tensor.untyped_storage()) for tensor in _tensors((args, list(kwargs.values())))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if id(storage) not in existing and id(storage) not in self._alive:
                self._watch(storage, tensor.device)  # A simulated card's storage is on meta.
        return out

    @property
    def alive_bytes(self) -> int:
        """The bytes of recorded storages that are still alive."""
        return sum(self._blocks[index][1] * (1 if created else -1) for index, created in self._events)

    def peak_blocks(self) -> list[Block]:
        """Return the blocks that were alive at the peak, leaving out those that are still alive now."""
        survivors = {index for index, _ in self._events} - {index for index, created in self._events if not created}
        events = [event for event in self._events if event[0] not in survivors]
        changes = (self._blocks[index][1] * (1 if created else -1) for index, created in events)
        totals = list(accumulate(changes, initial=0))
        alive: dict[int, Block] = {}
        for index, created in events[: totals.index(max(totals))]:
            if created:
                alive[index] = self._blocks[index]
            else:
                del alive[index]
        return list(alive.values())

    def _watch(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        index, key = len(self._blocks), id(storage)
        self._blocks.append((device, storage.nbytes()))
        self._events.append((index, True))

        def record_end(_: Any) -> None:
            self._alive.pop(key, None)
            self._events.append((index, False))

        self._alive[key] = weakref.ref(storage, record_end)


def preallocate(blocks: Iterable[Block]) -> None:
    """Allocate `blocks` together and free them, so that the cache has them ready; raises where memory runs out."""
    reserved = [torch.empty(size, dtype=torch.uint8, device=device) for device, size in blocks]
    del reserved


def _tensors(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [local_part(leaf) for leaf in leaves if leaf.layout is torch.strided]


class Updater:
    """Runs the update of one optimizer, its scaler and its scheduler.

    The first update is protected by a copy of parameters and optimizer state in host memory, and its temporary blocks
    are recorded. Later updates allocate and free such blocks first, so that `optimizer.step()` finds its memory. An
    update is protected again when the parameters with gradients, the parameter groups or the number of optimizer states
    have changed.

    Attributes:
        optimizer: The optimizer.
        scaler: Its scaler, if there is one.
        is_interrupted: True after an update failed half-way: the state is unknown, and later updates are refused.
        has_agreed: Whether all ranks have come to make, or have made, the update that runs.
    """

    def __init__(self, optimizer: Optimizer, scaler: GradScaler | None, scheduler: LRScheduler | None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._scheduler = scheduler
        self._protected_signature: Any = None
        self._temporaries: list[Block] = []
        self.is_interrupted = self.has_agreed = False

    def check(self) -> None:
        """Raise UpdateInterrupted if an earlier update failed half-way."""
        if self.is_interrupted:
            raise UpdateInterrupted(
                "an earlier update was interrupted half-way, the parameters are neither the old nor the new ones",
                hint="load a checkpoint and make a new Accumulator",
            )

    def common_facts(self) -> dict[str, object]:
        """Return what the optimizers of all ranks have to have in common, lest their parameters drift apart."""
        groups = self.optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        return {
            "the number of parameters in the optimizer's groups": [len(group["params"]) for group in groups],
            "whether the optimizer has state": bool(self.optimizer.state),
            # Processors may differ in the last bit. A tensor would have to be waited for.
            "the optimizer's lr": [f"{rate:.6g}" for rate in rates if isinstance(rate, int | float)],
        }

    def run(self, transaction: Transaction, agree: Callable[[], object]) -> bool:
        """Update once; return False if the scaler found gradients that are not finite and skipped the update.

        An exception of the scheduler after an unprotected update is raised as it is, since that update was made.

        Args:
            transaction: The state before the step, to which a protected update can be rolled back.
            agree: Called when memory is there, and after a protected update: returns once all ranks have got so far.

        Raises:
            UpdateInterrupted: The update failed half-way and was not protected.
        """
        if self._signature() != self._protected_signature:
            return self._run_protected(transaction, agree)
        preallocate(self._temporaries)
        agree()
        self.has_agreed = True
        try:
            updated = self._step(transaction.scale)
            transaction.commit()
        except BaseException as error:
            self.is_interrupted = True
            if isinstance(error, Exception):
                raise UpdateInterrupted(
                    f"{type(error).__name__} within the update, which cannot be undone: the parameters are neither the"
                    " old nor the new ones",
                    hint="load a checkpoint and make a new Accumulator",
                ) from error
            raise
        self._schedule(updated)
        return updated

    def _run_protected(self, transaction: Transaction, agree: Callable[[], object]) -> bool:
        transaction.protect(self.optimizer, self._scheduler)
        with StorageRecorder() as recorder:
            updated = self._step(transaction.scale)
            self._schedule(updated)
        agree()
        self.has_agreed = True
        transaction.commit()
        # A skipped update creates neither optimizer state nor temporary blocks.
        self._protected_signature = self._signature() if updated else None
        self._temporaries = recorder.peak_blocks()
        return updated

    def _step(self, scale: float) -> bool:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < scale:
                return False
        return True

    def _schedule(self, updated: bool) -> None:
        if updated and self._scheduler is not None:
            self._scheduler.step()

    def _signature(self) -> Any:
        plain, signature = (type(None), int, float), list[Any]()
        for group in self.optimizer.param_groups:
            parameters = [(id(parameter), parameter.grad is not None) for parameter in group["params"]]
            options = [(name, bool(value)) for name, value in group.items() if isinstance(value, plain)]
            signature.append((parameters, options))
        return signature, len(self.optimizer.state)


def optimizer_parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    """Return all parameters of `optimizer`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
