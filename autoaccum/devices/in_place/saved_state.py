"""The state that a trial in place may change: its size, its copy on the host, its restoration, its hash."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.coupling import list_names
from autoaccum.accumulation.out_of_memory import release_memory
from autoaccum.accumulation.rng_state import Generator
from autoaccum.accumulation.state_hash import PlainAttributes, changed_names, state_entries
from autoaccum.accumulation.transaction import TorchState, dense_parts, tensor_bytes
from autoaccum.devices.budget import AvailableMemory
from autoaccum.devices.delayed_signals import DelayedSignals
from autoaccum.devices.in_place.live_objects import TrialTarget
from autoaccum.errors import NotMeasuredError, UsageError, first_line
from autoaccum.units import MIB, format_bytes

_LEAST_MARGIN_BYTES = 256 * MIB
_MARGIN_SHARE = 0.05
_RELOAD = "the model is not as it was: load it again before training"
T = TypeVar("T")


@dataclass(frozen=True)
class LiveStateSize:
    """The size of the live state, in bytes.

    Attributes:
        copy_bytes: Host memory of a copy: parameters, buffers, `.grad`, optimizer state, and tensors that modules keep
            as attributes.
        held_bytes: Memory that it holds on the model's device; storages that tensors share count once.
    """

    copy_bytes: int
    held_bytes: int


def measure_live_state(roots: Mapping[str, nn.Module], optimizer: Optimizer | None, *, is_live: bool) -> LiveStateSize:
    """Add up the live state; without a live model, nothing of it counts as held."""
    modules = [module for root in roots.values() for module in root.modules()]
    parameters = [parameter for root in roots.values() for parameter in root.parameters()]
    kept = [[vars(module), module._buffers] for module in modules]
    trained = [] if optimizer is None else [list(optimizer.state.values()), optimizer.param_groups]
    found = _tensors([parameters, [parameter.grad for parameter in parameters], kept, trained])
    everything = list({id(tensor): tensor for tensor in found}.values())
    copy_bytes = sum(tensor_bytes(tensor) for tensor in everything)
    return LiveStateSize(copy_bytes, _storage_size(everything) if is_live else 0)


def check_host_copy(name: str, live: LiveStateSize, host: AvailableMemory, *, guarded_on_host: bool) -> None:
    """Check that a copy of the state fits into host memory, with a margin of 256 MiB or 5 % of the free memory.

    `guarded_on_host`: the Accumulator makes a second copy to guard a trial's first update; on the CPU that one is part
    of the budget.

    Raises:
        UsageError: It does not fit; nothing was touched.
    """
    needed = live.copy_bytes * (2 if guarded_on_host else 1)
    margin = max(_LEAST_MARGIN_BYTES, int(host.free_bytes * _MARGIN_SHARE))
    if needed + margin > host.free_bytes:
        raise UsageError(
            f"the copy of {name} and its optimizer takes {format_bytes(needed)} of host memory,"
            f" {format_bytes(host.free_bytes)} are free ({host.bound}), and {format_bytes(margin)} stay free",
            hint="plan it through its file, which needs no copy: autoaccum plan model.py",
        )


def _tensors(root: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor):
            yield node
        elif isinstance(node, Mapping):
            waiting.extend(node.values())
        elif isinstance(node, list | tuple):
            waiting.extend(node)


def _storage_size(tensors: Iterable[Tensor]) -> int:
    storages = {}
    parts = [part for tensor in tensors for part in dense_parts(tensor.detach())]
    for part in parts:
        try:
            storage = part.untyped_storage()
        except (RuntimeError, NotImplementedError):  # of another layout
            storages[id(part)] = part.nbytes
        else:
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class SavedState:
    """The state of live objects from before a trial.

    It covers the state in `TorchState`, and plain attributes of modules of the user's own classes. Not covered: torch's
    settings of the process, the state of other objects, hooks on nodes of the graph, version counters of tensors (a
    graph recorded before cannot run backward any more), and the position of an iterator.

    Attributes:
        own: The plain attributes.

    Args:
        roots: Modules by the prefix of their names.
        optimizer: The live optimizer, unless each trial makes its own.
        generators: Generators besides the global ones.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], optimizer: Optimizer | None, generators: Iterable[Generator] = ()
    ) -> None:
        self._roots, self._optimizer = roots, optimizer
        self._entries = self._hash()
        self._had_cuda = bool(torch.get_device_module("cuda").is_initialized())
        self._torch = TorchState(roots.values(), optimizer, generators)
        self.own = PlainAttributes(roots)

    def restore(self) -> None:
        """Restore everything; may be called again if it was interrupted."""
        self._torch.restore()
        self.own.restore()
        if not self._had_cuda and torch.cuda.is_available():
            # A seed set before CUDA has started is the one that cards start with: set it again.
            torch.cuda.manual_seed_all(torch.initial_seed())

    def differences(self) -> list[str]:
        """Return the names of all that is not as before."""
        return changed_names(self._entries, self._hash())

    def _hash(self) -> dict[str, str]:
        return state_entries(self._roots, self._optimizer, identity=True)


class StateRestorer:
    """Restores the state of live objects after every job; `at_once` as in `DelayedSignals`.

    Attributes:
        warnings: Warnings about Python attributes that trials change.
    """

    def __init__(self, target: TrialTarget, *, at_once: bool = False) -> None:
        self._target, self._at_once = target, at_once
        self.warnings: list[str] = []

    def run(self, job: Callable[[DelayedSignals], T]) -> T:
        """Run `job`, restore everything and compare it by hash; then return the job's result, or raise its exception.

        Raises:
            NotMeasuredError: Something could not be restored; if a signal ended `job`, this is a warning instead.
        """
        with DelayedSignals(at_once=self._at_once) as signals:
            state = SavedState(self._target.roots, self._target.optimizer, self._target.generators)
            failure: BaseException | None = None
            try:
                result = job(signals)
            except BaseException as error:
                failure = error
            try:
                problem = self._restore(state)
                if problem is not None and (failure is None or isinstance(failure, Exception)):
                    raise problem from failure
                if problem is not None:
                    warnings.warn(str(problem), RuntimeWarning, stacklevel=2)
                if failure is not None:
                    raise failure
            finally:
                del failure  # the traceback holds this frame
            return result

    def _restore(self, state: SavedState) -> NotMeasuredError | None:
        try:
            release_memory(self._target.device)  # Raises if the card's context is dead.
            kept = state.own.changed()
            state.restore()
            changed = state.differences()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            return NotMeasuredError(f"a trial in place could not be undone ({reason})", hint=_RELOAD)
        if kept:
            warning = (
                f"a trial changes what the model keeps in Python ({list_names(kept)}), which no rollback covers: keep"
                " state in buffers (register_buffer)"
            )
            self.warnings = [*self.warnings, *([] if warning in self.warnings else [warning])]
        if not changed:
            return None
        return NotMeasuredError(
            f"a trial in place has changed {list_names(changed)}, which could not be put back", hint=_RELOAD
        )
