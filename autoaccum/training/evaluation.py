"""Evaluations between updates: their schedule, their data, and their metrics. They do not change the training."""

from __future__ import annotations

import dataclasses
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

from autoaccum.accumulation.backpropagation import add_by_name, autocast, model_device
from autoaccum.accumulation.out_of_memory import clear_frames, find_out_of_memory, release_memory, shrink
from autoaccum.accumulation.rng_state import module_generators, seed_generators
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.accumulation.sharded_tensors import is_sharded_model, reshard
from autoaccum.accumulation.transaction import Transaction
from autoaccum.accumulation.whole_batch.joined_outputs import OutputsJoining
from autoaccum.accumulation.whole_batch.lockstep import OnePart, parts_run
from autoaccum.checks import check_function, describe_type
from autoaccum.errors import AutoaccumError, DoesNotFitError, UsageError, WorkloadError, first_line
from autoaccum.training.data_source import is_map_style
from autoaccum.training.data_workers import Reader
from autoaccum.training.fit_events import Evaluated, EvaluationFailed, Notice
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.ranks_agreement import TrainingRanks
from autoaccum.training.training_setup import TrainingComponents
from autoaccum.training.training_state import Progress
from autoaccum.workload.batches import batch_size, move_batch, split_batch
from autoaccum.workload.objective import Objective, match_weights
from autoaccum.workload.pytree import unwrap_batch
from autoaccum.workload.tracebacks import user_line


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

    def check_not_shared(self, trained_on: Any) -> None:
        """Raise a UsageError if training reads the same stream: it would miss what an evaluation reads."""
        read = (self._data, trained_on)
        underlying = [data.dataset if isinstance(data, DataLoader) else data for data in read]
        for own, other in (read, underlying):
            if own is other and hasattr(own, "load_state_dict"):
                raise UsageError(
                    f"evaluation and training read the same {type(own).__name__}, which stores its position",
                    hint="give a second one as the evaluation data, for example by copy.deepcopy",
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

    Without `evaluate` they are the loss: means weighted by their divisors, sums added. A loss of several terms gives
    each term by name, and `loss` is their sum. With `evaluate` they are the numbers it returns, averaged over samples.
    A coupled loss is that of each whole batch, averaged over samples.

    Args:
        evaluate: The workload's `evaluate(model, batch)`, which returns a number or a mapping of names to numbers;
            other entries of the mapping are ignored.
    """

    def __init__(self, objective: Objective, evaluate: Callable[[nn.Module, Any], Any] | None) -> None:
        self.samples = 0
        self._objective, self._evaluate = objective, evaluate
        self._name = getattr(evaluate, "__name__", "evaluate")
        self._is_sum = evaluate is None and objective.reduction == "sum"
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._outputs: list[Any] = []
        self._sizes: list[int] = []
        self._joining = OutputsJoining()

    def add(self, model: nn.Module, part: Any, cpu_batch: Any) -> None:
        """Evaluate `part`, on the model's device; `cpu_batch` is its copy on the CPU. If it raises, nothing is added.

        A term without weight is left out, since it may be 0/0. Of a coupled loss, the outputs wait for `end_batch`.

        Raises:
            WorkloadError: `evaluate` returned no number.
        """
        if self._evaluate is not None:
            figures = self._numbers(self._evaluate(model, unwrap_batch(part)))
            self._count(figures, dict.fromkeys(figures, float(batch_size(cpu_batch))), cpu_batch)
        elif self._objective.coupled:
            self._outputs.append(self._objective.outputs(model, part))
            self._sizes.append(batch_size(cpu_batch))
        else:
            self._count_terms(self._objective.terms(model, part), cpu_batch)

    def end_batch(self, model: nn.Module, cpu_batch: Any, device: torch.device) -> None:
        """Compute a coupled loss of the outputs of all parts of `cpu_batch`, which are on `device`."""

        def outputs_of(samples: int) -> Any:
            first = split_batch(cpu_batch, [samples, batch_size(cpu_batch) - samples])[0]
            return self._objective.outputs(model, move_batch(first, device))

        if self._outputs:
            outputs = self._joining.join(self._outputs, self._sizes, outputs_of)
            self._outputs, self._sizes = [], []
            self._count_terms(self._objective.coupled_terms(outputs, cpu_batch, device), cpu_batch)

    def _count_terms(self, terms: Mapping[str, Tensor], cpu_batch: Any) -> None:
        weights = match_weights(self._objective.weight(cpu_batch), terms)
        self._count({name: float(term) for name, term in terms.items()}, weights, cpu_batch)

    def _count(self, figures: Mapping[str, float], weights: Mapping[str, float], cpu_batch: Any) -> None:
        added = {
            name: figures[name] * (1.0 if self._is_sum else weight) if weight > 0 else 0.0
            for name, weight in weights.items()
        }
        self._sums, self._weights = add_by_name([self._sums, added]), add_by_name([self._weights, weights])
        self.samples += batch_size(cpu_batch)

    def totals(self) -> tuple[dict[str, float], dict[str, float], int]:
        """Return the sums, the weights and the samples so far, for `set_totals`."""
        return self._sums, self._weights, self.samples

    def set_totals(self, totals: Iterable[tuple[Mapping[str, float], Mapping[str, float], int]]) -> None:
        """Continue from the totals of several ranks."""
        sums, weights, counts = zip(*totals, strict=True)
        self._sums, self._weights, self.samples = add_by_name(sums), add_by_name(weights), sum(counts)

    def values(self) -> dict[str, float]:
        """Return the metrics by name. A term without any weight is NaN, and does not count in `loss`."""
        found = {
            name: self._sums[name] / (1.0 if self._is_sum else weight) if weight else math.nan
            for name, weight in self._weights.items()
        }
        if self._evaluate is not None:
            return found
        weighty = [found[name] for name, weight in self._weights.items() if weight > 0]
        total = sum(weighty) if weighty else math.nan
        return {"loss": total} if len(found) == 1 else {**found, "loss": total}

    def _numbers(self, returned: Any) -> dict[str, float]:
        named = returned if isinstance(returned, Mapping) else {self._name: returned}
        numbers = {str(name): float(value) for name, value in named.items() if _is_number(value)}
        if not numbers:
            raise WorkloadError(
                f"{self._name}(model, batch) returned {describe_type(returned)}, which is not a number",
                hint="return a number, or a dict of numbers",
            )
        return numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, int | float)


class Evaluation:
    """Evaluates in eval mode, without gradients, in the precision of training.

    After running out of memory, the rest of this evaluation and later ones use smaller micro-batches. Everything else
    that a step may change (see `Transaction`) is restored, and each evaluation reads the same data with the same seed,
    so the number of evaluations does not affect the training. Several ranks share the batches, and begin with the
    buffers of rank 0, such as BatchNorm's statistics. Of a sharded model, all ranks run all batches.

    Args:
        objective, evaluate: As for `EvaluationMetrics`.
        micro_batch: The largest micro-batch to begin with.
        loss_batch: The samples of which a coupled loss is computed, in as many parts as fit; None: it is not coupled.
        loss_modules: Modules that the loss uses, such as the criterion: their state is restored as well.
        seed: The seed for reading and evaluating.
        interruptible: Context in which the run may be stopped at any moment without loss.
        ranks: The ranks.

    Attributes:
        micro_batch: The largest micro-batch now.
        joined_samples: The most samples that `whole_batch(x)` had so far; 0 if it was not called.

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
        self.micro_batch, self._loss_batch, self.joined_samples = micro_batch, loss_batch, 0
        self._objective, self._evaluate, self._precision, self._data = objective, evaluate, precision, data
        self._loss_modules, self._seed, self._interruptible = list(loss_modules), seed, interruptible
        self._ranks = ranks or TrainingRanks()

    def run(self, model: nn.Module, update: int) -> Evaluated | EvaluationFailed:
        """Evaluate `model` after `update`; an exception becomes the reason of a failure.

        An interrupt or a request to stop is raised; a `sys.exit()` of the user's code counts as a failure.
        """
        started = time.perf_counter()
        score = EvaluationMetrics(self._objective, self._evaluate)
        failed: EvaluationFailed | None = None
        ranks, is_whole = self._ranks, is_sharded_model(model)
        ranks.copy_from_first(buffer for module in (model, *self._loss_modules) for buffer in module.buffers())
        try:
            with self._restoring_state(model), torch.no_grad(), self._interruptible():
                size = self._loss_batch or self.micro_batch
                share = (0, 1) if is_whole else (ranks.rank, ranks.size)
                for batch in self._data.batches(size, self._seed, *share):
                    self._run_batch(model, batch, score)
            if score.samples == 0 and ranks.rank == 0:  # It has the first batch, if there is one.
                raise WorkloadError("the evaluation data has no samples", hint="give some, or no evaluation data")
        except Exception as error:
            out_of_memory = isinstance(error, DoesNotFitError) or find_out_of_memory(error) is not None
            failed = EvaluationFailed(update, _reason(error), out_of_memory)
            clear_frames(error)
        if ranks.size > 1:
            failed = self._join_ranks(failed, score, is_whole=is_whole)
        if failed is None:
            return Evaluated(update, score.values(), score.samples, time.perf_counter() - started)
        release_memory(model_device(model))
        return failed

    def _join_ranks(
        self, failed: EvaluationFailed | None, score: EvaluationMetrics, *, is_whole: bool
    ) -> EvaluationFailed | None:
        """Add up the totals of all ranks, which go on with the least micro-batch; return the first failure."""
        gathered = self._ranks.gather((failed, self.micro_batch, score.totals()))
        answers = [answer for answer in gathered if answer is not None]
        self.micro_batch = min(size for _, size, _ in answers)
        for rank, (failure, *_) in enumerate(answers):
            if failure is not None:
                return dataclasses.replace(failure, reason=f"rank {rank}: {failure.reason}")
        if not is_whole:
            score.set_totals([totals for *_, totals in answers])
        return None

    def _run_batch(self, model: nn.Module, batch: Any, score: EvaluationMetrics) -> None:
        """Evaluate in parts. A part that does not fit is split further, and earlier parts are not repeated."""
        batch = self._objective.wrap_batch(batch)
        waiting, retries = [batch], 0
        while waiting:
            part = waiting.pop(0)
            size = batch_size(part)
            if size > self.micro_batch:
                waiting[:0] = split_batch(part, split_evenly(size, self.micro_batch))
                continue
            error = self._attempt(model, part, score)
            if error is None:
                continue
            _check_can_shrink(error, size)
            clear_frames(error)
            del error
            release_memory(model_device(model))
            self.micro_batch = shrink(size, retries)
            retries += 1
            waiting.insert(0, part)
        device = model_device(model)
        with autocast(self._precision, device):
            score.end_batch(model, batch, device)

    def _attempt(self, model: nn.Module, part: Any, score: EvaluationMetrics) -> Exception | None:
        """Evaluate a part and return its exception, since handling it would keep the tensors of all its frames."""
        device, running = model_device(model), OnePart()
        try:
            with autocast(self._precision, device), parts_run(running):
                score.add(model, move_batch(part, device), part)
            self.joined_samples = max(self.joined_samples, batch_size(part) if running.calls else 0)
        except SystemExit as leaving:
            return WorkloadError(f"it called sys.exit({leaving.code!r})", hint="an evaluation cannot end the training")
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


def _check_can_shrink(error: Exception, size: int) -> None:
    """Raise `error`, or `DoesNotFitError` for a single sample, unless the part can be split further."""
    try:
        out_of_memory = find_out_of_memory(error)
        if out_of_memory is None or (size == 1 and not out_of_memory.certain):
            raise error
        if size == 1:
            clear_frames(error)
            raise DoesNotFitError("not even one sample at a time fits: out of memory") from error
    finally:
        del error  # Its traceback holds this frame.


def _reason(error: Exception) -> str:
    """Return the type, the first line, and the line of the user's code that raised it.

    An error of autoaccum's own needs no type.
    """
    first, where, name = first_line(error), user_line(error), type(error).__name__
    text = first if isinstance(error, AutoaccumError) else f"{name}: {first}" if first else name
    return text if where is None else f"{text}, at {where}"


class Evaluator:
    """Evaluates every `eval_every` updates, when `eval_due` says so, or after each epoch, and at the end.

    There is at most one evaluation after an update. Averaged weights are evaluated too, as `ema_loss` next to `loss`.

    Args:
        evaluation: The evaluation to run; None if there is no evaluation data.
        components: The model, and the averaged one.
        request: The request, with `eval_every` and `eval_due`.
        notify: Called with each `Evaluated` or `EvaluationFailed`.

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
        self._evaluation, self._components, self._progress, self._notify = evaluation, components, progress, notify
        self._every, self._due, self._target = request.eval_every, request.eval_due, request.target_batch
        self._has_warned = False
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
        progress = self._progress
        if self._evaluation is None or progress.update in (0, progress.evaluated_at):
            return
        done = self._evaluation.run(self._components.model, progress.update)
        if isinstance(done, Evaluated) and self._components.averages is not None:
            averaged = self._evaluation.run(self._components.averages.model, progress.update)
            if isinstance(averaged, Evaluated):
                values = {**done.values, **{f"ema_{name}": value for name, value in averaged.values.items()}}
                averaged = Evaluated(done.update, values, done.samples, done.seconds + averaged.seconds)
            done = averaged
        progress.evaluated_at = progress.update
        if isinstance(done, Evaluated):
            progress.evaluation = dict(done.values)
            self._warn_of_parts(self._evaluation.joined_samples, min(self._target, done.samples))
        self._notify(done)

    def _warn_of_parts(self, joined: int, samples: int) -> None:
        """Warn once if `whole_batch(x)` had fewer samples in an evaluation than it has in training."""
        if not self._has_warned and 0 < joined < samples:
            self._has_warned = True
            self._notify(
                Notice(
                    f"in an evaluation whole_batch(x) is that of {joined} samples, in training of {self._target}: give"
                    f" evaluation_batch={self._target} (--evaluation-batch), or evaluation data in batches of that size"
                )
            )

    def state(self) -> dict[str, int]:
        """Return the checkpoint's entry: the micro-batch that fitted."""
        return {} if self._evaluation is None else {"micro_batch": self._evaluation.micro_batch}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a `state`."""
        if self._evaluation is not None and "micro_batch" in state:
            self._evaluation.micro_batch = min(self._evaluation.micro_batch, state["micro_batch"])
