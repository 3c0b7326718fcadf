"""Record inputs and outputs of modules by hooks, and compare those of a part of the batch with the whole's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.sources import pytree

Key: TypeAlias = "tuple[str, str, int]"
"""A module's name, `in` or `out`, and the number of its calls before this one."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 5e-2
_MOST_ROWS = 2048


class ModuleCalls:
    """Records inputs and outputs of modules in a run of the whole batch, and compares those of runs of its parts.

    A tensor of a part that differs is replaced by the whole's rows, so that only the module whose own code depends on
    the other samples is found, not those after it.

    Args:
        sizes: The numbers of samples of the parts.
        found: Filled with the names of modules that couple samples; None stands for the loss.
        pairs: Filled with the names of modules that return a table of all samples by all samples.

    Attributes:
        part: The index of the part that runs; None is the whole.
        mixes_inputs: Whether the loss gives the model inputs of a sample that depend on the others.
        top_outputs: The outputs of the modules that the loss calls, in a run of the whole, in order.
    """

    def __init__(
        self,
        sizes: Sequence[int] = (),
        found: dict[str | None, None] | None = None,
        pairs: dict[str, None] | None = None,
    ) -> None:
        self._sizes = sizes
        self._found, self._pairs = {} if found is None else found, {} if pairs is None else pairs
        self._whole: dict[Key, list[Tensor]] = {}
        self._row_indices: dict[tuple[Any, ...], list[Tensor]] = {}
        self.part: int | None = None
        self.mixes_inputs = False
        self.top_outputs: list[Tensor] = []

    @contextmanager
    def attach(self, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record or compare all modules of `roots`, which are given by name; remove all hooks at the end."""
        stack: list[tuple[str, int]] = []
        counts = Counter[str]()

        def enter(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
                caller = stack[-1][0] if stack else None
                stack.append((name, counts[name]))
                counts[name] += 1
                return self._visit((name, "in", stack[-1][1]), (args, kwargs), caller)

            return hook

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            name, count = stack.pop()
            if self.part is None and not stack:
                self.top_outputs += [tensor.detach().clone() for tensor in floating_tensors(output)]
            return self._visit((name, "out", count), output, name)

        with ExitStack() as hooks:
            for prefix, root in roots.items():
                for name, module in root.named_modules(prefix=prefix):
                    hooks.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def _visit(self, call: Key, tree: Any, responsible: str | None) -> Any:
        tensors = [tensor.detach().clone() for tensor in floating_tensors(tree)]
        if self.part is None:
            self._whole[call] = tensors
            return tree
        expected = self._whole.get(call, [])
        if len(expected) != len(tensors):
            return tree
        wholes = iter(expected)
        return map_floating(tree, lambda tensor: self._compare(next(wholes), tensor, call, responsible))

    def _compare(self, whole: Tensor, part: Tensor, call: Key, responsible: str | None) -> Tensor:
        """Return the tensor of the part or, if they differ, the whole's rows in its place."""
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
        for other in growing:  # A part may be padded to a shorter length.
            whole = whole if other == dim else whole.narrow(other, 0, part.shape[other])
        rows = self._rows(whole, part, dim, call) if growing else whole
        if rows.shape != part.shape or rows is part or len(growing) > 1 or (not growing and is_close(rows, part)):
            return part
        self._found[responsible] = None
        self.mixes_inputs |= call[:2] == ("", "in")
        return rows.clone().requires_grad_().clone() if part.requires_grad else rows.clone()

    def _rows(self, whole: Tensor, part: Tensor, dim: int, call: Key) -> Tensor:
        """Return the part if it equals some rows of the whole, or else the whole's rows of its likely samples."""
        length, total = part.shape[dim], whole.shape[dim]
        first = 0 if self.part == 0 else total - length
        candidates = self._row_indices.setdefault((self.part, call[0], call[2], length, total), [])
        candidates.append(torch.arange(first, first + length, device=whole.device))
        if self._match(whole, part, dim, candidates):
            return part
        if total <= _MOST_ROWS:  # In any order: some models sort by length, or flatten with time first.
            wholes, rows = (one.movedim(dim, 0).flatten(1).double().nan_to_num(0.0, 0.0, 0.0) for one in (whole, part))
            nearest = torch.cdist(rows, wholes, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            candidates.append(nearest)
            if is_close(whole.index_select(dim, nearest), part):
                candidates.insert(0, nearest)
                return part
        return whole.index_select(dim, candidates[0])

    @staticmethod
    def _match(whole: Tensor, part: Tensor, dim: int, candidates: list[Tensor]) -> bool:
        """Move the first candidate whose rows equal the part to the front; return whether there is one."""
        for indices in candidates:
            if is_close(whole.index_select(dim, indices), part):
                candidates.insert(0, indices)
                return True
        return False


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape are equal up to rounding, relative to the median of their entries."""
    if one.dtype == other.dtype and torch.equal(one, other):  # The median takes longer.
        return True
    tolerance = _TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    sizes = one[one.isfinite() & (one != 0)].abs()
    median = float(sizes.median()) if sizes.numel() else 0.0
    return torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * median, equal_nan=True)


def floating_tensors(tree: Any) -> list[Tensor]:
    """Return the dense floating-point tensors of a nested structure, in order; opaque objects count as empty."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_floating(tree, collect)
    return found


def map_floating(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested structure with `change` applied to its floating-point tensors; itself if none is changed."""
    if isinstance(node, Tensor):
        dense = node.is_floating_point() and not node.is_nested and not node.is_sparse and not node.is_sparse_csr
        return change(node) if dense else node
    children = pytree.children(node)
    if children is None:
        return node
    changed = [map_floating(child, change) for _, child in children]
    if all(new is old for new, (_, old) in zip(changed, children, strict=True)):
        return node
    return pytree.rebuild(node, changed)
