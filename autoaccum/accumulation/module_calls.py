"""The calls of modules in one run, recorded by hooks, and held against those of another with fewer samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.workload import pytree

Name: TypeAlias = "tuple[str, str, int]"
"""A module's name, `in` or `out`, and its calls before this one."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 5e-2
_MOST_ROWS = 2048


class ModuleCalls:
    """Records what goes into and comes out of modules in the run of the whole; in those of its parts, compares.

    What differs is exchanged for the whole's rows, so that only that is blamed whose own code depends on the others.

    `found` is filled with the names of what is blamed (None is the loss), `pairs` with the modules that give a table of
    all samples by all samples; `sizes` are the samples of the parts.

    Attributes:
        part: Which part runs; None: the whole.
        outermost: What the calls that the loss makes gave in the run of the whole, in order.
    """

    def __init__(
        self,
        sizes: Sequence[int] = (),
        found: dict[str | None, None] | None = None,
        pairs: dict[str, None] | None = None,
    ) -> None:
        self._sizes = sizes
        self._found, self._pairs = {} if found is None else found, {} if pairs is None else pairs
        self._whole: dict[Name, list[Tensor]] = {}
        self._known: dict[tuple[Any, ...], list[Tensor]] = {}
        self.part: int | None = None
        self.top_outputs: list[Tensor] = []

    @contextmanager
    def attach(self, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow the modules of `roots`, by name; no hook is left behind."""
        stack: list[tuple[str, int]] = []
        counts = Counter[str]()

        def enter(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
                caller = stack[-1][0] if stack else None
                stack.append((name, counts[name]))
                counts[name] += 1
                return self._look((name, "in", stack[-1][1]), (args, kwargs), caller)

            return hook

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            name, count = stack.pop()
            if self.part is None and not stack:
                self.top_outputs += [tensor.detach().clone() for tensor in floating(output)]
            return self._look((name, "out", count), output, name)

        with ExitStack() as hooks:
            for prefix, root in roots.items():
                for name, module in root.named_modules(prefix=prefix):
                    hooks.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def _look(self, call: Name, nest: Any, blamed: str | None) -> Any:
        tensors = [tensor.detach().clone() for tensor in floating(nest)]
        if self.part is None:
            self._whole[call] = tensors
            return nest
        expected = self._whole.get(call, [])
        if len(expected) != len(tensors):
            return nest
        wholes = iter(expected)
        return exchange(nest, lambda tensor: self._compare(next(wholes), tensor, call, blamed))

    def _compare(self, whole: Tensor, part: Tensor, call: Name, blamed: str | None) -> Tensor:
        """The tensor of a part, or what the whole has in its place."""
        assert self.part is not None
        total, size = sum(self._sizes), self._sizes[self.part]
        if whole.ndim != part.ndim or whole.numel() <= 1 or not part.numel():
            return part
        growing = [dim for dim, length in enumerate(part.shape) if length < whole.shape[dim]]
        samples = [dim for dim in growing if part.shape[dim] * total == whole.shape[dim] * size]
        if len(samples) > 1:
            if call[1] == "out":
                self._pairs[call[0]] = None
            return part
        dim = (samples or growing or [0])[0]
        for other in growing:  # Padding to the longest may be shorter in a part.
            whole = whole if other == dim else whole.narrow(other, 0, part.shape[other])
        right = self._rows(whole, part, dim, call) if growing else whole
        if right.shape != part.shape or is_close(right, part) or len(growing) > 1:
            return part
        self._found[blamed] = None
        return right.clone().requires_grad_().clone() if part.requires_grad else right.clone()

    def _rows(self, whole: Tensor, part: Tensor, dim: int, call: Name) -> Tensor:
        """The whole's rows of a part: where they are equal, or else where its samples likely are."""
        length, total = part.shape[dim], whole.shape[dim]
        first = 0 if self.part == 0 else total - length
        known = self._known.setdefault((self.part, call[0], call[2], length, total), [])
        known.append(torch.arange(first, first + length, device=whole.device))
        if total <= _MOST_ROWS:  # In any order: a batch may be sorted by length, or flattened with time first.
            wholes, rows = (one.movedim(dim, 0).flatten(1).double().nan_to_num(0.0, 0.0, 0.0) for one in (whole, part))
            known.append(torch.cdist(rows, wholes, compute_mode="donot_use_mm_for_euclid_dist").argmin(1))
        for places in known:
            if is_close(found := whole.index_select(dim, places), part):
                known.insert(0, places)
                return found
        return whole.index_select(dim, known[0])


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal but for rounding, relative to their usual entry."""
    tolerance = _TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    sizes = one[one.isfinite() & (one != 0)].abs()
    usual = float(sizes.median()) if sizes.numel() else 0.0
    return torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * usual, equal_nan=True)


def floating(nest: Any) -> list[Tensor]:
    """The dense floating tensors of a nest, in order; what cannot be looked into (a PackedSequence) has none."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    exchange(nest, keep)
    return found


def exchange(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nest with each of its `floating` tensors changed; itself where none was."""
    if isinstance(node, Tensor):
        dense = node.is_floating_point() and not node.is_nested and not node.is_sparse and not node.is_sparse_csr
        return change(node) if dense else node
    children = pytree.children(node)
    if children is None:
        return node
    changed = [exchange(child, change) for _, child in children]
    if all(new is old for new, (_, old) in zip(changed, children, strict=True)):
        return node
    return pytree.rebuild(node, changed)
