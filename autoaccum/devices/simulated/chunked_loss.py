"""A cross entropy whose logits are made of some rows at a time, and again in backward, whatever the model looks like.

What a head returns is put off (`Logits`). A loss takes it in pieces; whoever else reads it gets the whole, as always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial, partialmethod
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

CHUNKS = 8
_LEAST_CLASSES = 1024
_LINEAR = (F.linear, torch._C._nn.linear)
_BY_ELEMENT = ("float", "to", "tanh", "__neg__", "__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__")
"""What rows become as they are made, where it takes numbers alone."""
_FIRST = slice(None)


class Logits:
    """The logits that a head makes of hidden states, once somebody reads them.

    Args:
        hidden: What it takes.
        head: Makes logits of any rows of that.
        classes: How many it makes.
        swapped: Whether the classes are the second of three dimensions.
    """

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor], classes: int, swapped: bool = False) -> None:
        self.hidden, self.head, self.classes, self.swapped = hidden, head, classes, swapped
        self._whole: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached where `ChunkedLoss` is not entered, as in its own parts."""
        args, kwargs = tree_map(_read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def whole(self) -> Tensor:
        """All of them, as if nothing had been put off."""
        if self._whole is None:
            with torch._C.DisableTorchFunction():
                made = self.head(self.hidden)
            self._whole = made.transpose(1, 2) if self.swapped else made
        return self._whole

    @property
    def shape(self) -> torch.Size:
        """As of the whole."""
        rows = self.hidden.shape[:-1]
        return torch.Size((rows[0], self.classes, *rows[1:]) if self.swapped else (*rows, self.classes))

    @property
    def device(self) -> torch.device:
        """As of the whole."""
        return self.hidden.device

    def dim(self) -> int:
        """As of the whole."""
        return len(self.shape)

    ndim = property(dim)

    def size(self, dim: int | None = None) -> Any:
        """As of the whole."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Any:
        """Logits are, as they are made."""
        return self

    def view(self, *sizes: Any) -> Any:
        """Rows are arranged as hidden states."""
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        if self.swapped or sizes[-1] != self.classes:
            return self.whole().reshape(sizes)
        return self._of(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Likewise."""
        if self.swapped or end_dim % self.ndim == self.ndim - 1:
            return self.whole().flatten(start_dim, end_dim)
        return self._of(self.hidden.flatten(start_dim, end_dim))

    def transpose(self, one: int, other: int) -> Any:
        """Of three dimensions, the last two."""
        if self.ndim != 3 or {one % 3, other % 3} != {1, 2}:
            return self.whole().transpose(one, other)
        return Logits(self.hidden, self.head, self.classes, not self.swapped)

    def permute(self, *dims: Any) -> Any:
        """Likewise."""
        return self.transpose(1, 2) if tuple(dims) == (0, 2, 1) else self.whole().permute(*dims)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        plain = all(isinstance(each, slice) or each is ... for each in keys)
        of_rows = keys[-1] == _FIRST if ... in keys or len(keys) == self.ndim else True
        return self._of(self.hidden[key]) if plain and of_rows and not self.swapped else self.whole()[key]

    def _of(self, hidden: Tensor) -> Logits:
        return Logits(hidden, self.head, self.classes)

    def _by_element(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Tensor | Logits) for each in args):
            return getattr(self.whole(), name)(*map(_read, args), **kwargs)
        head = self.head
        step = methodcaller(name, *args, **kwargs)
        return Logits(self.hidden, lambda hidden: step(head(hidden)), self.classes, self.swapped)


for _name in _BY_ELEMENT:
    setattr(Logits, _name, partialmethod(Logits._by_element, _name))


class ChunkedLoss(TorchFunctionMode):
    """While it is entered, what a wide enough head returns is put off, and `cross_entropy` takes it in `CHUNKS`.

    Attributes:
        losses: How many were computed so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put a head off, or compute a loss in chunks."""
        kwargs = kwargs or {}
        if func in _LINEAR and not kwargs and is_wide(*args[1].shape[::-1]):
            weight, bias = args[1], args[2] if len(args) > 2 else None
            return Logits(args[0], lambda hidden: F.linear(hidden, weight, bias), weight.shape[0])
        if args and isinstance(args[0], Logits):
            if func is F.cross_entropy and _in_rows(args[0], args[1] if len(args) > 1 else kwargs.get("target")):
                self.losses += 1
                return self._in_chunks(*args, **kwargs)
            if func in (torch.flatten, torch.reshape, torch.transpose, torch.tanh):
                return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        args, kwargs = tree_map(_read, (args, kwargs))
        return func(*args, **kwargs)

    def _in_chunks(
        self,
        logits: Logits,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """`cross_entropy` of chunks of rows, each of which makes its logits again in backward."""

        def of_rows(hidden: Tensor, wanted: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():  # In backward, where it is run again, too.
                made, summed = logits.head(hidden), "none" if reduction == "none" else "sum"
                return F.cross_entropy(
                    made, wanted, weight, ignore_index=ignore_index, reduction=summed, label_smoothing=label_smoothing
                )

        rows = zip(logits.hidden.flatten(0, -2).chunk(CHUNKS), target.flatten().chunk(CHUNKS), strict=True)
        again: Any = partial(checkpoint, of_rows, use_reentrant=False, preserve_rng_state=False)
        losses: list[Tensor] = [again(hidden, wanted) for hidden, wanted in rows]
        if reduction == "none":
            return torch.cat(losses).view(target.shape)
        total = functools.reduce(torch.add, losses)
        if reduction == "sum":
            return total
        counted = target != ignore_index
        return total / (counted.sum() if weight is None else (weight[target.clamp(min=0)] * counted).sum())


def _in_rows(logits: Logits, target: Any) -> bool:
    """Return whether the target tells one class for each row, as PyTorch reads both."""
    plain = isinstance(target, Tensor) and not target.is_floating_point()
    return plain and target.shape == logits.hidden.shape[:-1] and (logits.swapped or logits.ndim == 2)


def is_wide(inputs: int, outputs: int) -> bool:
    """Return whether what is so projected may be logits worth a thought."""
    return outputs >= _LEAST_CLASSES and outputs > inputs


def _read(value: Any) -> Any:
    return value.whole() if isinstance(value, Logits) else value
