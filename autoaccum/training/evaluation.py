"""Evaluations between updates, which do not change the training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.accumulation.backpropagation import Backpropagation, UpdateParts, add_by_name, autocast
from autoaccum.accumulation.out_of_memory import clear_frames, find_out_of_memory, release_memory, shrink
from autoaccum.accumulation.rng_state import derive_seed, module_generators, seed_generators
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.accumulation.transaction import Transaction
from autoaccum.accumulation.whole_batch.coupled_loss import loss_of_outputs
from autoaccum.checks import check_function, describe_type
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.sharded_tensors import is_sharded_model, reshard
from autoaccum.sources.batches import batch_size, move_batch, split_batch
from autoaccum.sources.objective import Objective, Weights, match_weights
from autoaccum.sources.pytree import unwrap_batch
from autoaccum.training.data import is_map_style
from autoaccum.training.data_workers import Entries
from autoaccum.training.fit_events import Evaluated
from autoaccum.training.stopping import TrainingRanks
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup


class Totals(NamedTuple):
    """Metrics of some samples: sums of values times weights, and the weights, by name."""

    sums: Mapping[str, float]
    weights: Mapping[str, float]
    samples: int

    @classmethod
    def of(cls, figures: Mapping[str, float], weight: Weights, samples: int, *, adds_up: bool = False) -> Totals:
        """Return those of a part; a figure without weight may be 0/0, and does not count. Sums are not weighted."""
        weights = match_weights(weight, figures)
        factors = dict.fromkeys(weights, 1.0) if adds_up else weights
        sums = {name: figures[name] * factors[name] if weights[name] > 0 else 0.0 for name in weights}
        return cls(sums, weights, samples)

    @classmethod
    def of_all(cls, parts: Sequence[Totals]) -> Totals:
        """Return those of all samples of `parts`."""
        sums, weights = add_by_name(part.sums for part in parts), add_by_name(part.weights for part in parts)
        return cls(sums, weights, sum(part.samples for part in parts))


@dataclass(kw_only=True)
class Evaluation:
    """Evaluates in eval mode, without gradients, in the precision of training.

    Without `evaluate` the metrics are the loss, a coupled one of each whole batch. With `evaluate` they are the numbers
    it returns, averaged over samples. After running out of memory, the rest of this evaluation and later ones use
    smaller micro-batches. Everything else that a step may change (see `Transaction`) is restored, and each evaluation
    reads the same data with the same seed, so the number of evaluations does not affect the training. Several ranks
    share the batches, and begin with the buffers of rank 0, such as BatchNorm's statistics. Of a sharded model, all
    ranks run all batches.

    Attributes:
        evaluate: The workload's `evaluate(model, batch)`, which returns a number or a mapping of names to numbers;
            other entries of the mapping are ignored.
        data: As for training. Samples of a dataset are collated in parts as large as memory allows; batches of a
            DataLoader or another iterable are used as they are, unless they are too large.
        micro_batch: The largest micro-batch; lowered when memory runs out.
        collate: `collate(samples)`; None: torch's default_collate.
        workers: Processes that read a map-style dataset; a DataLoader has its own.
        loss_batch: The samples of which a coupled loss is computed, in as many parts as fit; None: it is not coupled.
        loss_modules: Modules that the loss uses, such as the criterion: their state is restored as well.
        seed: The seed for reading and evaluating.
        interruptible: Context in which the run may be stopped at any moment without loss.

    Raises:
        UsageError: The data can be read only once, or has no supported type.
        WorkloadError: `evaluate` is not a function of a model and a batch.
    """

    objective: Objective
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    precision: str = "fp32"
    data: Any
    micro_batch: int
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    loss_batch: int | None = None
    loss_modules: Sequence[nn.Module] = ()
    seed: int = 0
    interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
    ranks: TrainingRanks = field(default_factory=TrainingRanks)

    def __post_init__(self) -> None:
        if self.evaluate is not None:
            check_function(self.evaluate, "evaluate", "(model, batch)")
        self._has_samples = is_map_style(self.data) or isinstance(self.data, IterableDataset)
        if hasattr(self.data, "__next__") or not (self._has_samples or hasattr(self.data, "__iter__")):
            raise UsageError(
                f"the evaluation data is {describe_type(self.data)}, which cannot be read repeatedly",
                hint="give a dataset, a DataLoader or a list of batches: each evaluation reads it from the start",
            )
        self._adds_up = self.evaluate is None and self.objective.reduction == "sum"

    def run(self, model: nn.Module, update: int) -> Evaluated:
        """Evaluate `model` after `update`.

        Raises:
            DoesNotFitError: Not even one sample at a time fits.
            WorkloadError: The data has no samples, or `evaluate` returned no number.
            Exception: Errors of the user's code, unchanged.
        """
        started, ranks, parts = time.perf_counter(), self.ranks, list[Totals]()
        ranks.copy_from_first(buffer for module in (model, *self.loss_modules) for buffer in module.buffers())
        is_shared = not is_sharded_model(model)
        with self._restoring_state(model), torch.no_grad(), self.interruptible():
            forward = Backpropagation(
                model, self.objective, precision=self.precision, scaler=None, on_phase=lambda phase: None
            )
            for batch in self._batches(*((ranks.rank, ranks.size) if is_shared else (0, 1))):
                parts += self._run_batch(forward, self.objective.wrap_batch(batch))
        total = Totals.of_all(parts)
        if total.samples == 0 and ranks.rank == 0:  # It has the first batch, if there is one.
            raise WorkloadError("the evaluation data has no samples", hint="give some, or no evaluation data")
        answers = ranks.gather((self.micro_batch, total))
        self.micro_batch = min(size for size, _ in answers)
        if is_shared:
            total = Totals.of_all([of_rank for _, of_rank in answers])
        return Evaluated(update, self._values(total), total.samples, time.perf_counter() - started)

    def _batches(self, rank: int, ranks: int) -> Iterator[Any]:
        """Iterate over the data on the CPU: a dataset's samples in batches, batches as they are.

        Of several ranks, each has every so many-th batch; only those of a dataset are not read by the others.
        """
        data, size = self.data, self.loss_batch or self.micro_batch
        options: dict[str, Any] = {"collate_fn": self.collate, "generator": torch.Generator().manual_seed(self.seed)}
        if is_map_style(data):
            total = len(data)
            parts = (list(range(at, min(at + size, total))) for at in range(rank * size, total, ranks * size))
            return iter(Entries(DataLoader(data, batch_sampler=parts, num_workers=self.workers, **options)))
        entries = Entries(DataLoader(data, batch_size=size, **options) if self._has_samples else data)
        return islice(entries, rank, None, ranks)

    def _run_batch(self, forward: Backpropagation, batch: Any) -> Iterator[Totals]:
        """Evaluate in parts. A part that does not fit is split further, and earlier parts are not repeated."""
        waiting, parts, outputs, retries = [batch], list[Any](), list[Any](), 0
        while waiting:
            part = waiting.pop(0)
            size = batch_size(part)
            if size > self.micro_batch:
                waiting[:0] = split_batch(part, split_evenly(size, self.micro_batch))
                continue
            outcome = self._attempt(forward, part)
            if isinstance(outcome, Exception):
                _check_can_shrink(outcome, size)
                clear_frames(outcome)
                del outcome
                release_memory(forward.device)
                self.micro_batch = shrink(size, retries)
                retries += 1
                waiting.insert(0, part)
            elif isinstance(outcome, Totals):
                yield outcome
            else:
                parts.append(part)
                outputs += outcome
        if outputs:
            whole = UpdateParts([batch], parts)
            loss_of_outputs(forward, whole, outputs)
            figures, _ = whole.losses.read()
            yield Totals.of(figures, self.objective.weight(batch), batch_size(batch), adds_up=self._adds_up)

    def _attempt(self, forward: Backpropagation, part: Any) -> Totals | list[Any] | Exception:
        """Evaluate a part: return its metrics, or its outputs in a list, of which a coupled loss is yet to be computed.

        Its exception is returned, since handling it would keep the tensors of all its frames.
        """
        try:
            moved, samples = move_batch(part, forward.device), batch_size(part)
            if self.evaluate is not None:
                with autocast(self.precision, forward.device):
                    figures = _numbers(self.evaluate(forward.model, unwrap_batch(moved)), self.evaluate)
                return Totals.of(figures, float(samples), samples)
            if self.objective.coupled:
                return [forward.outputs(moved)]
            terms = {name: float(term) for name, term in forward.uncounted_terms(moved).items()}
            return Totals.of(terms, self.objective.weight(part), samples, adds_up=self._adds_up)
        except Exception as error:
            return error

    def _values(self, total: Totals) -> dict[str, float]:
        """Return the metrics by name, one without any weight as NaN; of a loss in several terms, their sum as well."""
        values = {
            name: total.sums[name] / (1.0 if self._adds_up else weight) if weight else math.nan
            for name, weight in total.weights.items()
        }
        if self.evaluate is not None:
            return values
        weighty = [values[name] for name, weight in total.weights.items() if weight > 0]
        loss = sum(weighty) if weighty else math.nan
        return {"loss": loss} if len(values) == 1 else {**values, "loss": loss}

    @contextmanager
    def _restoring_state(self, model: nn.Module) -> Iterator[None]:
        """Switch to eval mode and seed all generators; restore everything on exit."""
        roots = [model, *self.loss_modules]
        modules = [module for root in roots for module in root.modules()]
        parameters = [parameter for root in roots for parameter in root.parameters()]
        before = Transaction(modules, parameters, generators=module_generators(modules))
        try:
            model.eval()
            seed_generators(self.seed)
            for device in {tensor.device for tensor in (*parameters, *model.buffers())}:
                if device.type not in ("cpu", "meta"):
                    torch.get_device_module(device).default_generators[device.index].manual_seed(self.seed)
            yield
        finally:
            for root in roots:
                reshard(root)  # Else it keeps gathered parameters, which are none of its own.
            before.rollback()


def make_evaluation(
    setup: TrainingSetup,
    components: TrainingComponents,
    micro_batch: int,
    interruptible: Callable[[], AbstractContextManager[Any]],
    ranks: TrainingRanks,
) -> Evaluation | None:
    """Return the evaluation of a training with this `micro_batch`; None if it has no evaluation data.

    Raises:
        UsageError: Evaluations are requested and there is no data, or as `Evaluation`.
    """
    request, workload = setup.request, setup.workload
    if setup.eval_data is None:
        for name in ("eval_every", "eval_due"):
            if getattr(request, name) is not None:
                raise UsageError(
                    f"{name} is given, but no evaluation data",
                    hint="give eval_data, or define evaluation_dataset in the workload",
                )
        return None
    is_coupled = components.objective.coupled and workload.evaluate is None
    size = workload.evaluation_batch
    return Evaluation(
        objective=components.objective,
        evaluate=workload.evaluate,
        precision=components.spec.precision,
        data=setup.eval_data,
        collate=workload.collate,
        workers=request.workers,
        micro_batch=micro_batch if is_coupled else size or micro_batch,
        loss_batch=size or request.target_batch or micro_batch if is_coupled else None,
        loss_modules=components.loss_modules,
        seed=derive_seed(request.seed, "evaluation"),
        interruptible=interruptible,
        ranks=ranks,
    )


def _check_can_shrink(error: Exception, size: int) -> None:
    """Raise `error`, or `DoesNotFitError` for a single sample, unless the part can be split further."""
    try:
        out_of_memory = find_out_of_memory(error)
        if out_of_memory is None or (size == 1 and not out_of_memory.is_definite_oom):
            raise error
        if size == 1:
            clear_frames(error)
            raise DoesNotFitError("not even one sample at a time fits in an evaluation: out of memory") from error
    finally:
        del error  # Its traceback holds this frame.


def _numbers(returned: Any, evaluate: Callable[..., Any]) -> dict[str, float]:
    """Return the numbers that `evaluate` returned, by name."""
    own_name = getattr(evaluate, "__name__", "evaluate")
    named = returned if isinstance(returned, Mapping) else {own_name: returned}
    numbers = {str(name): float(value) for name, value in named.items() if _is_number(value)}
    if not numbers:
        raise WorkloadError(
            f"{own_name}(model, batch) returned {describe_type(returned)}, which is not a number",
            hint="return a number, or a dict of numbers",
        )
    return numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, int | float)
