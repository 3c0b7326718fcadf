"""Out-of-memory errors that tests inject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_of(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor) and node.layout is torch.strided:
        yield node
    elif isinstance(node, list | tuple):
        for child in node:
            yield from tensors_of(child)


class OutOfMemoryAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an out-of-memory error at the `number`-th storage that an operator creates, once."""

    def __init__(self, number: int, active: Callable[[], bool] = lambda: True, text: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = number
        self.fired = False
        self.active = active
        self.text = text

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.fired or not self.active():
            return out
        known = {id(tensor.untyped_storage()) for tensor in tensors_of((args, list((kwargs or {}).values())))}
        for tensor in tensors_of(out):
            if id(tensor.untyped_storage()) not in known:
                if self.left == 0:
                    self.fired = True
                    if self.text is None:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what a test refuses")
                    raise RuntimeError(self.text)
                self.left -= 1
        return out
