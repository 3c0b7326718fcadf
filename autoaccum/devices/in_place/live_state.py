"""Everything a trial may change: set aside in host memory, put back in place, and compared by hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.changes import OwnAttributes, changed_names, state_entries
from autoaccum.accumulation.randomness import Generator
from autoaccum.accumulation.state import TorchState
from autoaccum.devices.in_place.flags import Flags


class LiveState:
    """The state of live objects from before a trial.

    What `TorchState` covers, torch's process-wide flags, and plain attributes of modules of the user's own classes. Not
    covered: what other objects keep, hooks on nodes of the graph, how often a tensor was written to (a graph
    recorded before cannot be run backward any more), and where an iterator stands.

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
        self._flags = Flags()
        self._had_cuda = bool(torch.get_device_module("cuda").is_initialized())
        self._torch = TorchState(roots.values(), optimizer, generators)
        self._own = OwnAttributes(roots)

    def restore(self) -> None:
        """Put everything back; may be called again when it was interrupted."""
        self._flags.restore()
        self._torch.restore()
        self._own.restore()
        if not self._had_cuda and torch.cuda.is_available():
            # Seeding the CPU before CUDA has started leaves a seed for the cards to start with: this was theirs.
            torch.cuda.manual_seed_all(torch.initial_seed())

    def differences(self) -> list[str]:
        """What is not as before, by name."""
        return changed_names(self._entries, self._hash())

    def changed_attributes(self) -> list[str]:
        """Names of plain attributes of the user's own modules that changed."""
        return self._own.changed()

    def _hash(self) -> dict[str, str]:
        return state_entries(self._roots, self._optimizer, identity=True)
