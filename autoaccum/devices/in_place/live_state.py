"""Everything a trial may change: set aside in host memory, put back in place, and compared by hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.copies import StateCopy
from autoaccum.accumulation.digest import attribute_entries, state_entries, tensor_hooks
from autoaccum.accumulation.randomness import Generator, RandomState, seeded_devices
from autoaccum.devices.in_place.flags import Flags


class LiveState:
    """The state of live objects from before a trial.

    Covers, as the same objects with the same values: parameters, buffers (replaced, registered and renamed ones too),
    `.grad`, `requires_grad`, modes, hooks of modules and tensors, Python attributes of modules as deep as they can be
    told cheaply, the optimizer with all it keeps, the generators of Python, NumPy, torch and every card, and torch's
    process-wide flags. Not covered: what objects of other libraries keep, hooks on nodes of the graph, how often a
    tensor was written to (a graph recorded before cannot be run backward any more), and where an iterator stands.

    Args:
        roots: Modules by the prefix of their names.
        optimizer: The live optimizer, unless each trial makes its own.
        generators: Generators besides the global ones.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], optimizer: Optimizer | None, generators: Iterable[Generator] = ()
    ) -> None:
        self._roots, self._optimizer = roots, optimizer
        self._entries, self._attributes = self._hash()
        self._flags = Flags()
        self._had_cuda = bool(torch.get_device_module("cuda").is_initialized())
        self._random = RandomState(seeded_devices(), generators)
        leaves = _leaves(roots, optimizer)
        self._leaves = [_Leaf(leaf) for leaf in leaves]
        parts = [part for leaf in leaves for part in (leaf.grad, vars(leaf), *tensor_hooks(leaf))]
        self._copy = StateCopy([list(roots.values()), optimizer, leaves, parts], on_host=True, inside=True)

    def restore(self) -> None:
        """Put everything back; may be called again when it was interrupted."""
        self._flags.restore()
        self._copy.restore()
        for leaf in self._leaves:
            leaf.restore()
        self._random.restore()
        if not self._had_cuda and torch.cuda.is_available():
            # Seeding the CPU before CUDA has started leaves a seed for the cards to start with: this was theirs.
            torch.cuda.manual_seed_all(torch.initial_seed())

    def differences(self) -> tuple[list[str], list[str]]:
        """What is not as before, by name: of the training state, and of Python attributes."""
        entries, attributes = self._hash()
        return _changed(self._entries, entries), _changed(self._attributes, attributes)

    def _hash(self) -> tuple[dict[str, str], dict[str, str]]:
        return state_entries(self._roots, self._optimizer, identity=True), attribute_entries(self._roots)


class _Leaf:
    """What belongs to a parameter besides its values."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._requires_grad, self._gradient = tensor.requires_grad, tensor.grad
        self._hooks = tensor_hooks(tensor)

    def restore(self) -> None:
        if self._tensor.is_leaf:
            self._tensor.requires_grad_(self._requires_grad)
        self._tensor.grad = self._gradient
        for name, before in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), self._hooks, strict=True):
            if getattr(self._tensor, name, None) is not before:
                setattr(self._tensor, name, before)


def _leaves(roots: Mapping[str, nn.Module], optimizer: Optimizer | None) -> list[Tensor]:
    found: list[Tensor] = [parameter for root in roots.values() for parameter in root.parameters()]
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    found.extend(parameter for group in groups for parameter in group["params"])
    return list({id(tensor): tensor for tensor in found}.values())


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    names = [name for name, entry in after.items() if before.get(name) != entry]
    return names + [name for name in before if name not in after]
