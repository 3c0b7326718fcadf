"""Forward and backward over the parts of one effective batch, each multiplied by its share of the loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from autoaccum.accumulation.coupling import COMPARES_SAMPLES
from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.ranks.group import ONE_RANK, Ranks
from autoaccum.accumulation.reachable_objects import find_used_modules
from autoaccum.accumulation.sharded_tensors import is_sharded
from autoaccum.accumulation.step_result import StepPhase, warn_caller
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, parts_run
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size, join_batches, move_batch
from autoaccum.sources.objective import Objective, Reduction, Weights, match_weights
from autoaccum.sources.pytree import tensors

if TYPE_CHECKING:
    from autoaccum.accumulation.ranks.sharded import ShardedParts


def make_shares(weights: Sequence[Weights], reduction: Reduction) -> tuple[Weights, ...]:
    """Return the factor of each part's loss: a number, or one for each term of the loss.

    For a mean it is the part's weight over the total weight, for a sum 1.0. A part of weight zero has the factor 0 and
    is not run.

    Raises:
        WorkloadError: The parts' weights name different terms, or are numbers for some and mappings for others.

    >>> make_shares([3.0, 1.0, 0.0], "mean")
    (0.75, 0.25, 0.0)
    >>> make_shares([3.0, 1.0, 0.0], "sum")
    (1.0, 1.0, 0.0)
    """
    numbers = [weight for weight in weights if not isinstance(weight, dict)]
    terms = [weight for weight in weights if isinstance(weight, dict)]
    if numbers and terms:
        raise WorkloadError("weight(batch) is a number for some parts and a mapping for others", hint="return one kind")
    if numbers:
        total = sum(numbers)
        return tuple(_share(number, total, reduction) for number in numbers)
    names = list(terms[0])
    matched = [match_weights(weight, names) for weight in terms]
    totals = {name: sum(weight[name] for weight in matched) for name in names}
    return tuple({name: _share(weight[name], totals[name], reduction) for name in names} for weight in matched)


def has_weight(weight: Weights) -> bool:
    """Return whether `weight`, or one of its terms, is above zero."""
    return any(value > 0 for value in weight.values()) if isinstance(weight, dict) else weight > 0


def _share(weight: float, total: float, reduction: Reduction) -> float:
    return 0.0 if weight == 0 else weight / total if reduction == "mean" else 1.0


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class LossRecord:
    """The losses of the parts, as scalars that stay on their device until all are read at once.

    Attributes:
        names: The names of all terms, in order.
        shares: The term's name and the share of each entry of `values`.
        values: The unscaled losses, one for each term of each part.
    """

    names: dict[str, None] = field(default_factory=dict)
    shares: list[tuple[str, float]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, terms: Mapping[str, Tensor], shares: Mapping[str, float]) -> None:
        """Add the terms of a part, and the values of those that have a share."""
        self.names.update(dict.fromkeys(terms))
        for name, share in shares.items():
            if share > 0:
                self.shares.append((name, share))
                self.values.append(terms[name].detach().clone())

    def read(self, norm: Tensor | None) -> tuple[dict[str, float], float | None]:
        """Read the sum of each term with weight over the parts, and `norm`, in the step's only synchronisation."""
        scalars, values = [*self.values, *([] if norm is None else [norm])], list[float]()
        if scalars:
            values = list(map(float, torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()))
        sums = add_by_name({name: share * value} for (name, share), value in zip(self.shares, values, strict=False))
        return sums, None if norm is None else values[-1]


def add_by_name(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up what has the same name.

    >>> add_by_name([{"a": 1.0, "b": 2.0}, {"a": 3.0}])
    {'a': 4.0, 'b': 2.0}
    """
    sums: dict[str, float] = {}
    for each in figures:
        for name, figure in each.items():
            sums[name] = sums.get(name, 0.0) + figure
    return sums


def add_up(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars on the device of the first; a single one as it is."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum() if terms[1:] else terms[0]


def total_loss(ranks: Sequence[tuple[Sequence[str], Mapping[str, float]]]) -> tuple[float, dict[str, float]]:
    """Return the effective batch's loss and its terms from each rank's names and sums; a term without weight is NaN.

    >>> total_loss([(["a", "b"], {"a": 1.0}), ([], {}), (["a", "b"], {"a": 2.0})])
    (3.0, {'a': 3.0, 'b': nan})
    """
    names = dict.fromkeys(name for names, _ in ranks for name in names)
    totals = add_by_name(sums for _, sums in ranks)
    return sum(totals.values()), {name: totals.get(name, math.nan) for name in names}


PartsRunner: TypeAlias = (
    "Callable[[Backpropagation, Sequence[Any], Sequence[Weights], Sequence[Any], LossRecord], None]"
)
"""Runs forward and backward of all parts, with their shares, of batches that a coupled loss reads; records losses."""


class Backpropagation:
    """Runs forward and backward of each part, so that the gradients add up to the effective batch's.

    BatchNorm works as in PyTorch; `batchnorm` has a subclass for each mode. Parts are moved to the device
    of the model's first parameter. `on_phase` is called with each phase as it begins. `run_parts` replaces the loop
    over the parts where they need each other (`whole_batch`), `sharded` where FSDP2 shards the model.
    `compares_samples` is True once the loss was seen to compare samples.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        precision: str,
        scaler: GradScaler | None,
        on_phase: Callable[[StepPhase], None],
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.run_parts: PartsRunner | None = None
        self.sharded: ShardedParts | None = None
        self.model, self.ranks = model, ranks
        self.objective = objective
        self.criterion = objective.criterion_module
        self._precision = precision
        self._scaler = scaler
        self.on_phase = on_phase
        self._check_loss = self._has_checked_loss = self.compares_samples = False
        self.device = model_device(model)

    def run(
        self,
        parts: Sequence[Any],
        shares: Sequence[Weights],
        buffers: GradientBuffers | None,
        batches: Sequence[Any],
    ) -> LossRecord:
        """Run `parts` one by one; each one's backward frees its graph.

        Parts without weight are not run, since their loss may be 0/0. `batches` are what the parts were split from; a
        coupled loss reads them.
        """
        record = LossRecord()
        are_several = len(parts) > 1 or self.ranks.size > 1
        self._check_loss = not self._has_checked_loss and (sum(map(has_weight, shares)) > 1 or self.ranks.size > 1)
        self.device = model_device(self.model)
        with self._around_parts(), torch.enable_grad(), nullcontext() if buffers is None else buffers:
            if self.run_parts is not None and are_several:
                self.run_parts(self, parts, shares, batches, record)
                return record
            with parts_run(IN_SEQUENCE if are_several else None):
                if self.sharded is not None:
                    self.sharded.run(self, parts, shares, buffers, record)
                    return record
                for part, share in zip(parts, shares, strict=True):
                    if has_weight(share):
                        self.on_phase("batch")
                        self.run_part(move_batch(part, self.device), share, buffers, record)
        return record

    def _around_parts(self) -> AbstractContextManager[None]:
        """Return the context in which all parts of an update run."""
        return nullcontext()

    def warnings(self, modules: Iterable[nn.Module], *, accumulates: bool) -> list[str]:
        """Return warnings about BatchNorm among `modules`, which are all there are.

        There are none unless the step `accumulates` several parts.
        """
        return []

    def run_part(self, part: Any, weights: Weights, buffers: GradientBuffers | None, record: LossRecord) -> None:
        """Run forward and backward of a part that is on the model's device; record its loss."""
        self.on_phase("forward")
        # What the loss is made of lives until backward has ended, as in training loops.
        _scaled, loss, _terms = self.weighted_terms(part, weights, buffers, record)
        if self._check_loss:
            self._check_loss, self._has_checked_loss = False, True
            self.compares_samples = compares_samples(loss, self.model, part)
            if self.compares_samples:
                warn_caller(COMPARES_SAMPLES)
        self.on_phase("backward")
        self.backward(loss)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield name and module for all modules of the model and the criterion, and of others that the loss uses."""
        seen: set[nn.Module] = set()
        for name, module in named_modules(self.model, self.criterion):
            seen.add(module)
            yield name, module
        for prefix, root in find_used_modules(self.objective, self.model).items():
            yield from root.named_modules(seen, prefix)

    def weighted_terms(
        self, part: Any, weights: Weights, buffers: GradientBuffers | None, record: LossRecord
    ) -> tuple[list[Tensor], Tensor, Mapping[str, Tensor]]:
        """Run the forward of a part; return the terms by their shares, their sum, and the terms as they are."""
        terms = self._forward(self.objective.terms, part)
        shares = match_weights(weights, terms)
        # The buffers multiply by the common share in float32: multiplied into a bf16 loss, it would be 0.4 % off.
        common = 1.0
        if buffers is not None and buffers.takes_share:
            buffers.share = common = max(shares.values())
        losses = [terms[name] * (share / common) for name, share in shares.items() if share > 0]
        losses = losses or [next(iter(terms.values())).new_zeros(())]  # In lock step, parts without weight run, too.
        record.add(terms, shares)
        return losses, add_up(losses), terms

    def uncounted_terms(self, part: Any) -> Mapping[str, Tensor]:
        """Run the forward of a part that takes no part in the update; return the terms of its loss."""
        terms: Mapping[str, Tensor] = self._forward(self.objective.terms, part)
        return terms

    def outputs(self, part: Any) -> Any:
        """Run the forward of a part up to the outputs of which a coupled loss is computed."""
        return self._forward(self.objective.outputs, part)

    def _forward(self, function: Callable[[nn.Module, Any], Any], part: Any) -> Any:
        """Return `function(model, part)`, which runs the forward of a part."""
        # An autocast of the user's around the whole loop would keep the weights that it cast before an update.
        torch.clear_autocast_cache()
        with autocast(self._precision, self.device):
            result = function(self.model, part)
        torch.clear_autocast_cache()
        return result

    def coupled_loss(self, outputs: Any, batches: Sequence[Any], record: LossRecord) -> Tensor:
        """Return the loss of the outputs of all `batches`."""
        batch = join_batches(batches) if batches[1:] else batches[0]
        with autocast(self._precision, self.device):
            terms = self.objective.coupled_terms(outputs, batch, self.device)
        record.add(terms, dict.fromkeys(terms, 1.0))
        return add_up(list(terms.values()))

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
        """Run the backward of a scaled loss, which is released when this returns, as training loops do.

        With `inputs`, only these get gradients.
        """
        if not loss.requires_grad or (inputs is not None and not inputs):
            return
        loss = self.scaled(loss)
        torch.autograd.backward(loss, inputs=inputs)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss by the scale of the scaler, if there is one."""
        return loss if self._scaler is None else self._scaler.scale(loss)


def named_modules(model: nn.Module, criterion: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module for all modules of `model` and of a criterion that is one; a root is named by its class."""
    seen: set[nn.Module] = set()
    for prefix, root in (("", model), ("criterion.", criterion)):
        for name, module in () if root is None else root.named_modules(seen):
            yield prefix + (name or type(module).__name__), module


_NODES, _LEAST, _VIEWS = 200, 5, 4
"""Limits of the search for a table: autograd nodes from the loss on (behind them is the model), samples (a smaller
number is too often the size of something else), and views of each sample."""


def compares_samples(loss: Tensor, model: nn.Module, part: Any) -> bool:
    """Return whether `loss` is computed from a table of samples by samples of `part`, or of views of them.

    Only the shapes in the autograd graph are read. A square table does not count if its size is also that of a
    parameter's dimension or of another dimension of the batch.
    """
    samples = batch_size(part)
    if samples < _LEAST:
        return False
    other_sizes = {size for parameter in model.parameters() for size in parameter.shape}
    other_sizes |= {size for leaf in tensors(part) for size in leaf.shape[1:]}
    squares = {(samples * views,) * 2 for views in range(1, _VIEWS + 1) if samples * views not in other_sizes}
    queue, seen = deque([loss.grad_fn]), set[Any]()
    while queue and len(seen) < _NODES:
        node: Any = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(tuple(made.shape) in squares for made in getattr(node, "_input_metadata", ())):
            return True
        queue.extend(after for after, _ in node.next_functions)
    return False


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward in `precision` on `device`: autocast for `bf16` and `fp16`, none for `fp32`."""
    return torch.autocast(device.type, dtype=_AUTOCAST[precision]) if precision in _AUTOCAST else nullcontext()


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter of `model`, or else of its first buffer, or else the CPU.

    Sharded parameters that are offloaded to the host are gathered on the device of their mesh.
    """
    tensor: Any = next((one for tensors in (model.parameters(), model.buffers()) for one in tensors), None)
    if tensor is not None and is_sharded(tensor) and tensor.device.type != (kind := tensor.device_mesh.device_type):
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu") if tensor is None else tensor.device
