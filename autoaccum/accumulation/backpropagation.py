"""Forward and backward over the parts of one effective batch, each loss multiplied by the factor of its part."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.ranks.group import ONE_RANK, Ranks
from autoaccum.accumulation.reachable_objects import find_used_modules
from autoaccum.accumulation.step_result import StepPhase, warn_caller
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, parts_run
from autoaccum.errors import WorkloadError
from autoaccum.messages import Message, message
from autoaccum.sharded_tensors import is_sharded
from autoaccum.sources.batches import batch_size, join_batches, move_batch
from autoaccum.sources.objective import Objective, Reduction, Weights, match_weights
from autoaccum.sources.pytree import tensors

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_loss_factors(weights: Sequence[Weights], reduction: Reduction) -> tuple[Weights, ...]:
    """Return the factor of each part's loss: a number, or one for each term of the loss.

    For a mean it is the part's weight over the total weight, for a sum 1.0. A part of weight zero has the factor 0 and
    is not run.

    Raises:
        WorkloadError: The parts' weights name different terms, or are numbers for some and mappings for others.

    >>> make_loss_factors([3.0, 1.0, 0.0], "mean")
    (0.75, 0.25, 0.0)
    >>> make_loss_factors([3.0, 1.0, 0.0], "sum")
    (1.0, 1.0, 0.0)
    """
    first = weights[0]
    if any(isinstance(weight, dict) != isinstance(first, dict) for weight in weights):
        raise WorkloadError("weight(batch) is a number for some parts and a mapping for others", hint="return one kind")
    matched = [match_weights(weight, first if isinstance(first, dict) else [""]) for weight in weights]
    totals = add_by_name(matched)

    def factor(weight: float, total: float) -> float:
        return 0.0 if weight == 0 else weight / total if reduction == "mean" else 1.0

    factors = [{name: factor(value, totals[name]) for name, value in weight.items()} for weight in matched]
    return tuple(factors) if isinstance(first, dict) else tuple(factor[""] for factor in factors)


def has_weight(weight: Weights) -> bool:
    """Return whether `weight`, or one of its terms, is above zero."""
    return any(value > 0 for value in weight.values()) if isinstance(weight, dict) else weight > 0


@dataclass
class LossRecord:
    """The losses of the parts, as scalars that stay on their device until all are read at once.

    Attributes:
        names: The names of all terms, in order.
        entries: For each term of each part, its name, its factor, and the unscaled loss.
    """

    names: dict[str, None] = field(default_factory=dict)
    entries: list[tuple[str, float, Tensor]] = field(default_factory=list)

    def add(self, terms: Mapping[str, Tensor], factors: Mapping[str, float]) -> None:
        """Add the terms of a part, and the values of those that have a factor."""
        self.names.update(dict.fromkeys(terms))
        self.entries += [(name, one, terms[name].detach().clone()) for name, one in factors.items() if one > 0]

    def read(self, norm: Tensor | None = None) -> tuple[dict[str, float], float | None]:
        """Read the sum of each term with weight over the parts, and `norm`, in the step's only synchronisation."""
        scalars = [value for *_, value in self.entries] + ([] if norm is None else [norm])
        values = torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist() if scalars else []
        pairs = zip(self.entries, values, strict=False)
        sums = add_by_name({name: factor * float(value)} for (name, factor, _), value in pairs)
        return sums, None if norm is None else float(values[-1])


@dataclass
class UpdateParts:
    """What one update runs on this rank, and the losses that this gives.

    Attributes:
        batches: What the parts were split from; a coupled loss reads them.
        parts: The parts, in order.
        factors: The factors of their losses (`make_loss_factors`).
        buffers: Where gradients are summed; None: in `.grad`.
        losses: Their losses.
    """

    batches: Sequence[Any]
    parts: Sequence[Any]
    factors: Sequence[Weights] = ()
    buffers: GradientBuffers | None = None
    losses: LossRecord = field(default_factory=LossRecord)


def add_by_name(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up what has the same name.

    >>> add_by_name([{"a": 1.0, "b": 2.0}, {"a": 3.0}])
    {'a': 4.0, 'b': 2.0}
    """
    sums: dict[str, float] = {}
    for by_name in figures:
        for name, figure in by_name.items():
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


PartsRunner: TypeAlias = "Callable[[Backpropagation, UpdateParts], None]"
"""Runs forward and backward of all parts, so that they can need each other; records their losses."""


class RunsParts(Protocol):
    """Runs the parts of an update in its own way, as `ranks.sharded.ShardedParts` does."""

    is_running: bool

    def deal(
        self, ranks: Ranks, update: UpdateParts, factors: Sequence[Sequence[Weights]], trained: Sequence[Tensor]
    ) -> None:
        """Prepare the parts of this rank, before they run."""

    def run(self, backpropagation: Backpropagation, update: UpdateParts) -> None:
        """Run them."""


class Backpropagation:
    """Runs forward and backward of each part, so that the gradients add up to the effective batch's.

    BatchNorm works as in PyTorch; `batchnorm` has a subclass for each mode. Parts are moved to the device of the
    model's first parameter.

    Attributes:
        on_phase: Called with each phase as it begins.
        run_parts: Replaces the loop over the parts where they need each other (`whole_batch`).
        sharded: Replaces it where FSDP2 shards the model.
        compares_samples: True once the loss was seen to compare samples.
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
        sharded: RunsParts | None = None,
    ) -> None:
        self.model, self.objective, self.criterion = model, objective, objective.criterion_module
        self.ranks, self.sharded, self.on_phase = ranks, sharded, on_phase
        self.run_parts: PartsRunner | None = None
        self._precision, self._scaler = precision, scaler
        self._check_loss = self._has_checked_loss = self.compares_samples = False
        self.device = model_device(model)

    def run(self, update: UpdateParts) -> None:
        """Run the parts of `update` one by one; each one's backward frees its graph.

        Parts without weight are not run, since their loss may be 0/0.
        """
        are_several = len(update.parts) > 1 or self.ranks.size > 1
        counting = sum(map(has_weight, update.factors))
        self._check_loss = not self._has_checked_loss and (counting > 1 or self.ranks.size > 1)
        self.device = model_device(self.model)
        with self._around_parts(), torch.enable_grad(), update.buffers or nullcontext():
            if self.run_parts is not None and are_several:
                self.run_parts(self, update)
                return
            with parts_run(IN_SEQUENCE if are_several else None):
                if self.sharded is not None:
                    self.sharded.run(self, update)
                    return
                for part, factors in zip(update.parts, update.factors, strict=True):
                    if has_weight(factors):
                        self.on_phase("batch")
                        self.run_part(move_batch(part, self.device), factors, update.losses, update.buffers)

    def _around_parts(self) -> AbstractContextManager[None]:
        """Return the context in which all parts of an update run."""
        return nullcontext()

    def warnings(self, modules: Iterable[nn.Module], *, accumulates: bool) -> list[Message]:
        """Return warnings about BatchNorm among `modules`, which are all there are.

        There are none unless the step `accumulates` several parts.
        """
        return []

    def run_part(self, part: Any, factors: Weights, losses: LossRecord, buffers: GradientBuffers | None = None) -> None:
        """Run forward and backward of a part that is on the model's device; record its loss."""
        self.on_phase("forward")
        # What the loss is made of lives until backward has ended, as in training loops.
        _scaled, loss, _terms = self.weighted_terms(part, factors, losses, buffers)
        if self._check_loss:
            self._check_loss, self._has_checked_loss = False, True
            self.compares_samples = compares_samples(loss, self.model, part)
            if self.compares_samples:
                warn_caller(message("compares_samples"))
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
        self, part: Any, factors: Weights, losses: LossRecord, buffers: GradientBuffers | None = None
    ) -> tuple[list[Tensor], Tensor, Mapping[str, Tensor]]:
        """Run the forward of a part; return the terms by their factors, their sum, and the terms as they are.

        `buffers` take the common factor of the terms, where they have parameters of half precision.
        """
        terms = self._forward(self.objective.terms, part)
        by_name, common = match_weights(factors, terms), 1.0
        if buffers is not None and buffers.takes_factor:
            # They multiply by it in float32: multiplied into a bf16 loss, it would be 0.4 % off.
            buffers.factor = common = max(by_name.values())
        scaled = [terms[name] * (factor / common) for name, factor in by_name.items() if factor > 0]
        scaled = scaled or [next(iter(terms.values())).new_zeros(())]  # In lock step, parts without weight run, too.
        losses.add(terms, by_name)
        return scaled, add_up(scaled), terms

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

    def coupled_loss(self, outputs: Any, batches: Sequence[Any], losses: LossRecord) -> Tensor:
        """Return the loss of the outputs of all `batches`."""
        batch = join_batches(batches) if batches[1:] else batches[0]
        with autocast(self._precision, self.device):
            terms = self.objective.coupled_terms(outputs, batch, self.device)
        losses.add(terms, dict.fromkeys(terms, 1.0))
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
        if any(tuple(entry.shape) in squares for entry in getattr(node, "_input_metadata", ())):
            return True
        queue.extend(inner for inner, _ in node.next_functions)
    return False


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward in `precision` on `device`: autocast for `bf16` and `fp16`, none for `fp32`."""
    return torch.autocast(device.type, dtype=_AUTOCAST[precision]) if precision in _AUTOCAST else nullcontext()


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter of `model`, or else of its first buffer, or else the CPU.

    Sharded parameters that are offloaded to the host are gathered on the device of their mesh.
    """
    tensor: Any = next(chain(model.parameters(), model.buffers()), None)
    if tensor is not None and is_sharded(tensor) and tensor.device.type != (kind := tensor.device_mesh.device_type):
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu") if tensor is None else tensor.device
