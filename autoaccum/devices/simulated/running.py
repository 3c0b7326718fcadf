"""Which module of a model an operator runs for: in forward, in backward, and in a forward within backward."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autoaccum.devices.simulated.labels import NO_MODULE, ModuleName, Role

_NODE_OF_LEAF = "AccumulateGrad"


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `root.named_modules()`, which would have each module hashed: that numbers it (`numbering`), in this order."""
    known: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in known:
            continue
        known.add(id(module))
        yield path, module
        inner = ((f"{path}.{name}" if path else name, each) for name, each in module._modules.items())
        waiting += reversed([(name, each) for name, each in inner if each is not None])


class Running:
    """Follows the calls of a model's modules while it is entered (`followed`).

    Autograd numbers what forward does, and each step of a backward pass knows the number of the one it belongs to
    (`_sequence_nr` of its node; `torch.autograd._get_sequence_nr` is the next). So what is running is noted along with
    that number as modules are entered and left, and looked up in backward. What checkpointing runs again enters its
    modules anew. A module that is not the model's, such as a loss, counts as part of who calls it, and what a gradient
    of a gradient takes belongs to who asked for the first.

    Args:
        model: Gives the model, or None as long as it is not there.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._indices: dict[int, int] = {}
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._stack: list[tuple[int, bool]] = []
        self._numbers: list[int] = []
        self._running: list[int] = []
        self.names: list[ModuleName] = [NO_MODULE]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all modules of this process."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def now(self) -> tuple[int, Role]:
        """The index of the module an operator runs for at this moment, and what its memory comes to be by."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return (self._stack[-1][0] if self._stack else 0), "plain"
        if type(node).__name__ == _NODE_OF_LEAF:
            return self.owner_of(node.variable), "summed"
        if self._stack and self._stack[-1][1]:
            return self._stack[-1][0], "recomputed"
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._running[index] if index >= 0 else 0), "recomputed" if torch.is_grad_enabled() else "plain"

    def owner_of(self, tensor: torch.Tensor) -> int:
        """The index of the module whose own parameter or buffer `tensor` is; 0 for none's."""
        known = self._owners.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else 0  # Another may lie where one has died.

    def modules(self) -> Iterator[tuple[nn.Module, int]]:
        """The model's modules with their indices, once it is there; each under the first of its names."""
        self._look()
        return zip(self._modules, count(1), strict=False)

    def own(self, tensor: torch.Tensor, module: int) -> None:
        """Note whose `tensor` is, unless another had it first."""
        known = self._owners.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._owners[id(tensor)] = weakref.ref(tensor), module

    def _look(self) -> None:
        model = None if self._modules else self._model()
        if model is not None:
            for path, module in walk_modules(model):
                self._indices[id(module)] = len(self.names)
                self._modules.append(module)
                self.names.append(ModuleName(path, type(module).__name__))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._look()
        outside = self._stack[-1][0] if self._stack else 0
        within_backward = torch._C._current_autograd_node() is not None
        self._stack.append((self._indices.get(id(module), outside), within_backward))
        self._note()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._running.append(self._stack[-1][0] if self._stack else 0)
