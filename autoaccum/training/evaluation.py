"""Evaluations between updates: their data, their metrics, and when they run. They do not change the training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord, add_by_name, autocast
from autoaccum.accumulation.out_of_memory import clear_frames, find_out_of_memory, release_memory, shrink
from autoaccum.accumulation.rng_state import module_generators, seed_generators
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.accumulation.sharded_tensors import is_sharded_model, reshard
from autoaccum.accumulation.transaction import Transaction
from autoaccum.accumulation.whole_batch.coupled_loss import loss_of_outputs
from autoaccum.checks import check_function, describe_type
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.sources.batches import batch_size, move_batch, split_batch
from autoaccum.sources.objective import Objective, match_weights
from autoaccum.sources.pytree import unwrap_batch
from autoaccum.training.data_source import is_map_style
from autoaccum.training.data_windows import Reader
from autoaccum.training.fit_events import Evaluated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.stopping import TrainingRanks
from autoaccum.training.training_setup import TrainingComponents
from autoaccum.training.training_state import Progress


class EvaluationData:
    """The samples or batches of an evaluation.

    Args:
        data: As for training. Samples of a dataset are collated in parts as large as memory allows; batches of a
            DataLoader or another iterable are used as they are, unless they are too large.
        collate: `collate(samples)`; None: torch's default_collate.
        workers: Processes that read a map-style dataset; a DataLoader has its own.

    Raises:
        UsageError: The data can be read only once, or has no supported type.
    """

    def __init__(self, data: Any, *, collate: Callable[[list[Any]], Any] | None = None, workers: int = 0) -> None:
        self._data, self._collate, self._workers = data, collate, workers
        self._has_samples = is_map_style(data) or isinstance(data, IterableDataset)
        if hasattr(data, "__next__") or not (self._has_samples or hasattr(data, "__iter__")):
            raise UsageError(
                f"the evaluation data is {describe_type(data)}, which cannot be read repeatedly",
                hint="give a dataset, a DataLoader or a list of batches: each evaluation reads it from the start",
            )

    def batches(self, size: int, seed: int, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        """Iterate over the data on the CPU: a dataset's samples in batches of `size`, batches as they are.

        Of several ranks, each has every so many-th batch; only those of a dataset are not read by the others.
        """
        options: dict[str, Any] = {"collate_fn": self._collate, "generator": torch.Generator().manual_seed(seed)}
        if is_map_style(self._data):
            total = len(self._data)
            own = (list(range(at, min(at + size, total))) for at in range(rank * size, total, ranks * size))
            return iter(Reader(DataLoader(self._data, batch_sampler=own, num_workers=self._workers, **options)))
        source = DataLoader(self._data, batch_size=size, **options) if self._has_samples else self._data
        return islice(Reader(source), rank, None, ranks)


class EvaluationMetrics:
    """Metrics over all evaluation data, as if it were one batch.

    Args:
        adds_up: Whether they are sums; else they are means, weighted by their divisors.
        is_loss: Whether they are the terms of a loss: `loss` is their sum, and a term without weight does not count.
    """

    def __init__(self, *, adds_up: bool, is_loss: bool) -> None:
        self.samples = 0
        self._adds_up, self._is_loss = adds_up, is_loss
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, figures: Mapping[str, float], weights: Mapping[str, float], samples: int) -> None:
        """Add the figures of a part. One without weight is left out, since it may be 0/0."""
        added = {
            name: figures[name] * (1.0 if self._adds_up else weight) if weight > 0 else 0.0
            for name, weight in weights.items()
        }
        self._sums, self._weights = add_by_name([self._sums, added]), add_by_name([self._weights, weights])
        self.samples += samples

    def totals(self) -> tuple[dict[str, float], dict[str, float], int]:
        """Return the sums, the weights and the samples so far, for `set_totals`."""
        return self._sums, self._weights, self.samples

    def set_totals(self, totals: Iterable[tuple[Mapping[str, float], Mapping[str, float], int]]) -> None:
        """Continue from the totals of several ranks."""
        sums, weights, counts = zip(*totals, strict=True)
        self._sums, self._weights, self.samples = add_by_name(sums), add_by_name(weights), sum(counts)

    def values(self) -> dict[str, float]:
        """Return the metrics by name; one without any weight is NaN."""
        values = {
            name: self._sums[name] / (1.0 if self._adds_up else weight) if weight else math.nan
            for name, weight in self._weights.items()
        }
        if not self._is_loss:
            return values
        weighty = [values[name] for name, weight in self._weights.items() if weight > 0]
        total = sum(weighty) if weighty else math.nan
        return {"loss": total} if len(values) == 1 else {**values, "loss": total}


class Evaluation:
    """Evaluates in eval mode, without gradients, in the precision of training.

    Without `evaluate` the metrics are the loss, a coupled one of each whole batch. With `evaluate` they are the numbers
    it returns, averaged over samples. After running out of memory, the rest of this evaluation and later ones use
    smaller micro-batches. Everything else that a step may change (see `Transaction`) is restored, and each evaluation
    reads the same data with the same seed, so the number of evaluations does not affect the training. Several ranks
    share the batches, and begin with the buffers of rank 0, such as BatchNorm's statistics. Of a sharded model, all
    ranks run all batches.

    Args:
        evaluate: The workload's `evaluate(model, batch)`, which returns a number or a mapping of names to numbers;
            other entries of the mapping are ignored.
        micro_batch: The largest micro-batch to begin with.
        loss_batch: The samples of which a coupled loss is computed, in as many parts as fit; None: it is not coupled.
        loss_modules: Modules that the loss uses, such as the criterion: their state is restored as well.
        seed: The seed for reading and evaluating.
        interruptible: Context in which the run may be stopped at any moment without loss.

    Attributes:
        micro_batch: The largest micro-batch now.

    Raises:
        WorkloadError: `evaluate` is not a function of a model and a batch.
    """

    def __init__(
        self,
        objective: Objective,
        evaluate: Callable[[nn.Module, Any], Any] | None,
        precision: str,
        data: EvaluationData,
        *,
        micro_batch: int,
        loss_batch: int | None = None,
        loss_modules: Iterable[nn.Module] = (),
        seed: int = 0,
        interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext,
        ranks: TrainingRanks | None = None,
    ) -> None:
        if evaluate is not None:
            check_function(evaluate, "evaluate", "(model, batch)")
        self.micro_batch, self._loss_batch = micro_batch, loss_batch
        self._objective, self._evaluate, self._precision, self._data = objective, evaluate, precision, data
        self._loss_modules, self._seed, self._interruptible = list(loss_modules), seed, interruptible
        self._ranks = ranks or TrainingRanks()

    def run(self, model: nn.Module, update: int) -> Evaluated:
        """Evaluate `model` after `update`.

        Raises:
            DoesNotFitError: Not even one sample at a time fits.
            WorkloadError: The data has no samples, or `evaluate` returned no number.
            Exception: Errors of the user's code, unchanged.
        """
        started, ranks = time.perf_counter(), self._ranks
        is_loss = self._evaluate is None
        metrics = EvaluationMetrics(adds_up=is_loss and self._objective.reduction == "sum", is_loss=is_loss)
        ranks.copy_from_first(buffer for module in (model, *self._loss_modules) for buffer in module.buffers())
        share = (0, 1) if is_sharded_model(model) else (ranks.rank, ranks.size)
        with self._restoring_state(model), torch.no_grad(), self._interruptible():
            forward = Backpropagation(
                model, self._objective, precision=self._precision, scaler=None, on_phase=lambda phase: None
            )
            for batch in self._data.batches(self._loss_batch or self.micro_batch, self._seed, *share):
                self._run_batch(forward, self._objective.wrap_batch(batch), metrics)
        if metrics.samples == 0 and ranks.rank == 0:  # It has the first batch, if there is one.
            raise WorkloadError("the evaluation data has no samples", hint="give some, or no evaluation data")
        answers = [answer for answer in ranks.gather((self.micro_batch, metrics.totals())) if answer is not None]
        self.micro_batch = min(size for size, _ in answers)
        if share != (0, 1):
            metrics.set_totals([totals for _, totals in answers])
        return Evaluated(update, metrics.values(), metrics.samples, time.perf_counter() - started)

    def _run_batch(self, forward: Backpropagation, batch: Any, metrics: EvaluationMetrics) -> None:
        """Evaluate in parts. A part that does not fit is split further, and earlier parts are not repeated."""
        waiting, outputs, parts, retries = [batch], list[Any](), list[Any](), 0
        while waiting:
            part = waiting.pop(0)
            size = batch_size(part)
            if size > self.micro_batch:
                waiting[:0] = split_batch(part, split_evenly(size, self.micro_batch))
                continue
            error = self._attempt(forward, part, metrics, outputs)
            if error is None:
                parts.append(part)
                continue
            _check_can_shrink(error, size)
            clear_frames(error)
            del error
            release_memory(forward.device)
            self.micro_batch = shrink(size, retries)
            retries += 1
            waiting.insert(0, part)
        if outputs:
            record, samples = LossRecord(), batch_size(batch)
            loss_of_outputs(forward, outputs, parts, [batch], record)
            figures, _ = record.read(None)
            metrics.add(figures, match_weights(self._objective.weight(batch), figures), samples)

    def _attempt(
        self, forward: Backpropagation, part: Any, metrics: EvaluationMetrics, outputs: list[Any]
    ) -> Exception | None:
        """Evaluate a part and return its exception, since handling it would keep the tensors of all its frames.

        Of a coupled loss, which is computed of the whole batch, the outputs are added to `outputs`.
        """
        try:
            moved, samples = move_batch(part, forward.device), batch_size(part)
            if self._evaluate is not None:
                with autocast(self._precision, forward.device):
                    figures = _numbers(self._evaluate(forward.model, unwrap_batch(moved)), self._evaluate)
                metrics.add(figures, dict.fromkeys(figures, float(samples)), samples)
            elif self._objective.coupled:
                outputs.append(forward.outputs(moved))
            else:
                terms = {name: float(term) for name, term in forward.uncounted_terms(moved).items()}
                metrics.add(terms, match_weights(self._objective.weight(part), terms), samples)
        except Exception as error:
            return error
        return None

    @contextmanager
    def _restoring_state(self, model: nn.Module) -> Iterator[None]:
        """Switch to eval mode and seed all generators; restore everything on exit."""
        roots = [model, *self._loss_modules]
        modules = [module for root in roots for module in root.modules()]
        parameters = [parameter for root in roots for parameter in root.parameters()]
        before = Transaction(modules, parameters, generators=module_generators(modules))
        try:
            model.eval()
            seed_generators(self._seed)
            for device in {tensor.device for tensor in (*parameters, *model.buffers())}:
                if device.type not in ("cpu", "meta"):
                    torch.get_device_module(device).default_generators[device.index].manual_seed(self._seed)
            yield
        finally:
            for root in roots:
                reshard(root)  # Else it keeps gathered parameters, which are none of its own.
            before.rollback()


class Evaluator:
    """Evaluates every `eval_every` updates, when `eval_due` says so, or after each epoch, and at the end.

    There is at most one evaluation after an update. Averaged weights are evaluated too, as `ema_loss` next to `loss`.

    Args:
        evaluation: The evaluation to run; None if there is no evaluation data.
        components: The model, and the averaged one.
        request: The request, with `eval_every` and `eval_due`.
        notify: Called with each `Evaluated`.

    Raises:
        UsageError: The request says when to evaluate, but there is no evaluation data.
    """

    def __init__(
        self,
        evaluation: Evaluation | None,
        components: TrainingComponents,
        request: FitRequest,
        progress: Progress,
        notify: Callable[[Any], Any],
    ) -> None:
        self.evaluation, self._components, self._progress, self._notify = evaluation, components, progress, notify
        self._every, self._due = request.eval_every, request.eval_due
        self._after_epochs = self._every is None and self._due is None
        if evaluation is None and not self._after_epochs:
            name = "eval_due" if self._every is None else "eval_every"
            raise UsageError(
                f"{name} is given, but no evaluation data",
                hint="give eval_data, or define evaluation_dataset in the workload",
            )

    def run_if_due(self) -> None:
        """Evaluate after an update if that is due."""
        if self._due is not None:
            is_due = self._due(self._progress.samples)
        else:
            is_due = self._every is not None and self._progress.update % self._every == 0
        if is_due:
            self.run()

    def run_after_epoch(self) -> None:
        """Evaluate after an epoch, unless the request says when to evaluate."""
        if self._after_epochs:
            self.run()

    def run_missed(self) -> None:
        """On resuming, run the evaluation that an interruption may have prevented."""
        if not self._after_epochs:
            if self._progress.update not in (0, self._progress.evaluated_at):
                self.run_if_due()
        elif self._progress.epoch > 0 and self._progress.epoch_samples == 0:
            self.run()

    def run(self) -> None:
        """Evaluate now, unless this update has been evaluated."""
        progress, averages = self._progress, self._components.averages
        if self.evaluation is None or progress.update in (0, progress.evaluated_at):
            return
        evaluated = self.evaluation.run(self._components.model, progress.update)
        if averages is not None:
            averaged = self.evaluation.run(averages.model, progress.update)
            values = {**evaluated.values, **{f"ema_{name}": value for name, value in averaged.values.items()}}
            evaluated = Evaluated(progress.update, values, evaluated.samples, evaluated.seconds + averaged.seconds)
        progress.evaluated_at, progress.evaluation = progress.update, dict(evaluated.values)
        self._notify(evaluated)


def _check_can_shrink(error: Exception, size: int) -> None:
    """Raise `error`, or `DoesNotFitError` for a single sample, unless the part can be split further."""
    try:
        out_of_memory = find_out_of_memory(error)
        if out_of_memory is None or (size == 1 and not out_of_memory.certain):
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
