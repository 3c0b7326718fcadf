"""The inspection of a workload before any trial: on a few samples, without a limit on memory."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.activation_checkpointing import trained_blocks
from autoaccum.accumulation.argument_checks import storage_bytes, unwrap_model
from autoaccum.accumulation.backpropagation import autocast, model_device
from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.coupling_probe import probe_workload
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, on_device
from autoaccum.accumulation.rng_state import RngState
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.accumulation.update import StorageRecorder, optimizer_parameters
from autoaccum.devices.base import Inspection
from autoaccum.devices.environment import CARD_VARIABLES, HOST_VARIABLES, read_environment
from autoaccum.devices.meters import Meter, make_meter
from autoaccum.devices.trial_run import TrialRun, seed_everything
from autoaccum.errors import WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.sharded_tensors import model_class
from autoaccum.sources import pytree
from autoaccum.sources.batches import move_batch
from autoaccum.sources.model_loss import ignores_items
from autoaccum.sources.step_recipe import describe_recipe
from autoaccum.sources.weight_check import check_weighting, suggests_weight
from autoaccum.sources.workload import Workload
from autoaccum.spec import WorkloadFacts

_SEEDS = 4
_DRAWS = torch.Tag.nondeterministic_seeded
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Forward = Callable[[int, int], tuple[int, bool]]
"""Runs a forward of a size from a seed: the bytes that stay alive for its backward, and whether draws decide which."""
SAMPLES = 2
"""BatchNorm in training mode refuses a single sample."""

_LAYOUT_SAMPLES = 3
"""In a batch of two samples, a pair could be taken for one entry per sample."""


def inspect_workload(workload: Workload, rank_samples: int, meter: Meter | None = None) -> Inspection:
    """Build everything once, make one update from a small batch, and check the weighting of its parts.

    Raises:
        WorkloadError: The workload cannot be trained: its batch has another size than requested, it has no trainable
            parameters, or its loss is not a scalar, not finite or not connected to them.
    """
    meter = make_meter("cpu") if meter is None else meter
    meter.start()
    size = probe_size(workload, SAMPLES, rank_samples)
    run = TrialRun(dataclasses.replace(workload, ema=False, hold_outputs=False), size, meter.device)
    accumulator, batch = run.prepare((size,))
    model, optimizer = run.built
    with on_device(find_auxiliary_modules(workload).values(), meter.device):
        with collect_warnings() as said:
            before = RngState().digest()
            # A coupled loss needs one batch: samples that are there twice are alike.
            is_whole = bool(workload.coupled) or size == rank_samples
            first = accumulator.step(batch) if is_whole else accumulator.step_parts([batch, batch])
            has_drawn = RngState().digest() != before
            if not math.isfinite(first.loss):
                raise WorkloadError(
                    f"the loss of batch({size}) is {first.loss}",
                    hint="training on it would destroy the model: look for a division by zero, log(0), or a mean over"
                    " nothing",
                )
            update_bytes = meter.peak_bytes()
            if workload.coupled and rank_samples >= 2 * size:
                accumulator.step(workload.build_batch(2 * size))
        forward = remember_forwards(workload, model)
        workload, least_size, notes = probe_sizes(workload, model, forward, rank_samples, has_drawn=has_drawn)
        sample_bytes = (
            measure_sample_bytes(forward, size, workload.multiple_of or 1) if rank_samples >= 2 * size else None
        )
    if model_device(model) != run.origin:  # `model()` may return the same object again, where it was made.
        model.to(run.origin)
        workload.objective.move_criterion(run.origin)
    coupling, batchnorms = probe_workload(workload, model), batchnorm_names(model)
    if workload.batchnorm == "exact":
        coupling = coupling.without(batchnorms)
    coupled = coupling.warnings(covered=batchnorms, is_joint=bool(workload.coupled))
    said = [warning for warning in said if warning.code not in ("weight_mismatch", "labels_ignored")]
    # `check_weighting` knows more of the weighting. A coupled loss has no weights, and a part's values of
    # whole_batch(x) are not those of training.
    needs_others = bool(coupled or accumulator.whole_batch)
    weighting = [] if workload.coupled else check_weighting(workload, coupled=needs_others, built=model)
    return Inspection(
        **describe_run(workload, run, rank_samples, terms=first.terms, weighting=weighting),
        environment=describe_environment(meter.device),
        least_size=least_size,
        update_bytes=update_bytes,
        resident_bytes=resident_bytes(optimizer, meter.device),
        update_samples=size,
        sample_bytes=sample_bytes,
        coupling=coupling,
        warnings=tuple(weighting),
        accumulation_warnings=(*said, *coupled),
        notes=notes,
    )


def resident_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Return the bytes of parameters, gradients and optimizer state on `device`, which an update has made."""
    parameters = optimizer_parameters(optimizer)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    state = [tensor for values in optimizer.state.values() for tensor in pytree.tensors(values)]
    return sum(tensor.nbytes for tensor in (*parameters, *trained, *state) if tensor.device == device)


def describe_run(
    workload: Workload, run: TrialRun, rank_samples: int, *, terms: Iterable[str], weighting: Iterable[Message]
) -> dict[str, Any]:
    """Return the fields `workload` and `spec` of the inspection of a workload, of which `run` has made an update.

    `terms` are the names of the loss, `weighting` the warnings about its divisor.
    """
    model, optimizer = run.built
    objective, parameters = workload.objective, list(model.parameters())
    batch = workload.build_batch(probe_size(workload, _LAYOUT_SAMPLES, rank_samples))
    recipe = describe_recipe(objective, model, batch, terms, **describe_model(workload, model))
    facts = WorkloadFacts(
        name=workload.name,
        digest=workload.digest,
        model=model_class(unwrap_model(model)).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=storage_bytes(parameters),
        dtypes=tuple(dict.fromkeys(name_dtype(parameter.dtype) for parameter in parameters)),
        blocks=len(trained_blocks(model)),
        optimizer=type(optimizer).__name__,
        loss=name_loss(workload),
        reduction=objective.reduction,
        weight=objective.divisor_label,
        has_weight=objective.weight_function is not None,
        assumes_weight=objective.assumes_divisor,
        whole_batch=None if run.accumulator is None else run.accumulator.whole_batch,
        modules={
            name: storage_bytes([*module.parameters(), *module.buffers()])
            for name, module in find_auxiliary_modules(workload).items()
        },
        token_functions=tuple(name for name in ("lengths", "trim") if callable(getattr(workload, name))),
        recipe=dataclasses.replace(recipe, misweighted=next(filter(suggests_weight, weighting), None)),
    )
    return {"workload": facts, "spec": workload.recorded(), "sample_lengths": workload.sample_lengths}


def name_dtype(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as `bf16`."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def describe_model(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """Return what the recipe of a step has to know of the model."""
    return {
        # Of models of transformers only, which a Trainer trains.
        "checkpointing": any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()),
        "ignores_items": getattr(workload.loss, "ignores_items", ignores_items)(model),
        "trainer": getattr(workload.loss, "trained_by", None),
    }


def probe_size(workload: Workload, count: int, rank_samples: int) -> int:
    """Return `count` rounded up to a multiple that the workload can run, at most `rank_samples`."""
    multiple = workload.multiple_of or 1
    return min(-(-count // multiple) * multiple, rank_samples)


def probe_sizes(
    workload: Workload, model: nn.Module, forward: Forward, rank_samples: int, *, has_drawn: bool
) -> tuple[Workload, int, tuple[Message, ...]]:
    """Find which micro-batches a workload can run; `has_drawn`: an update drew random numbers on the host.

    `forward` is of the workload and the model.

    Returns:
        The workload, with `multiple_of=2` if that was found; the least size; notes for the plan.
    """
    notes = []
    if (error := _find_multiple(workload, model, forward, rank_samples)) is not None:
        workload = dataclasses.replace(workload, multiple_of=2)
        notes.append(message("multiple_found", error=first_line(error)))
    if has_drawn and _varies_with_draws(forward, probe_size(workload, SAMPLES, rank_samples)):
        notes.append(message("random_memory"))
    return workload, _find_least_size(workload, model, rank_samples), tuple(notes)


def _find_multiple(workload: Workload, model: nn.Module, forward: Forward, rank_samples: int) -> Exception | None:
    """Return the error of 1 sample if 2 and 4 samples run while 1 and 3 raise; BatchNorm refuses 1, but runs 3.

    None if that is not so, or if the workload sets `multiple_of`.
    """
    if workload.multiple_of is not None or rank_samples < 2:
        return None
    with suppress(Exception):  # A model that cannot be observed can still train.
        forward(3, 0)
        return None
    if _try_forward(workload, model, 3) is None:
        return None
    error = _try_forward(workload, model, 1)
    return error if error is not None and _try_forward(workload, model, 4) is None else None


def _find_least_size(workload: Workload, model: nn.Module, rank_samples: int) -> int:
    """Return the smallest micro-batch that can be trained, in samples: BatchNorm refuses one value per channel.

    Under `exact` it normalises by all of the update's `rank_samples` samples.
    """
    multiple = workload.multiple_of or 1
    sees_one = workload.batchnorm != "frozen" and (workload.batchnorm != "exact" or rank_samples == 1)
    norms = [] if not sees_one else batchnorm_names(model, workload.objective.criterion_module)
    if multiple > 1 or not norms:
        return multiple
    error = _try_forward(workload, model, 1)
    if error is None:
        return 1
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        return 2  # torch/nn/functional.py, _verify_batch_size
    raise error


def _try_forward(workload: Workload, model: nn.Module, size: int) -> Exception | None:
    """Return the exception of a forward of `size` samples; None if it ran, or ran out of memory."""
    try:
        workload.objective.terms(model, move_batch(workload.build_batch(size), model_device(model)))
    except Exception as error:
        return None if find_out_of_memory(error) is not None else error
    return None


def _varies_with_draws(forward: Forward, size: int) -> bool:
    """Return whether forward of `size` samples holds other memory with other random numbers."""
    held = set[int]()
    with suppress(Exception):  # A model that cannot be observed can still train.
        for seed in range(_SEEDS):
            held_bytes, is_decided = forward(size, seed)
            held.add(held_bytes)
            if not is_decided:
                break
    return len(held) > 1


def name_loss(workload: Workload) -> Literal["loss", "criterion", "model"]:
    """Return the name of the workload's loss: `model` if the model computes it."""
    if workload.objective.model_loss is not None:
        return "model"
    return "loss" if workload.criterion is None else "criterion"


@contextmanager
def collect_warnings() -> Iterator[list[Message]]:
    """Collect the Accumulator's warnings for the plan; other warnings are shown at the end."""
    said: list[Message] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AccumulationWarning)
        yield said
    for warning in caught:
        if isinstance(warning.message, AccumulationWarning):
            said.append(warning.message.message)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def measure_sample_bytes(forward: Forward, size: int, more: int) -> int | None:
    """Return the bytes per sample that stay alive after forward for its backward, without workspaces and gradients.

    It is the difference between batches of `size` samples and of some `more`, in which constant bytes cancel out. The
    search uses it as a hint: None if it cannot be measured, for any reason.
    """
    try:
        (small, _), (large, _) = forward(size, 0), forward(size + more, 0)
    except Exception:  # A model that cannot be observed can still train.
        return None
    return (large - small) // more if large > small else None


class DrawRecorder(StorageRecorder):  # type: ignore[no-untyped-call]
    """Records storages, and whether what is drawn `decides` which operators run: whether a value or shape is read."""

    def __init__(self) -> None:
        super().__init__()
        self.decides = False
        self._drawn: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, record its storages, and mark those that depend on random numbers."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inputs, outputs = map(_storages, (args, kwargs or {})), _storages(out)
        is_drawn = not self._drawn.isdisjoint(chain(*inputs))
        self.decides |= is_drawn and not _READS.isdisjoint(func.tags)
        mark = self._drawn.update if is_drawn or _DRAWS in func.tags else self._drawn.difference_update
        mark(outputs)
        return out


def _storages(tree: Any) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in pytree.tensors(tree)]


def _host_draws() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


def remember_forwards(workload: Workload, model: nn.Module) -> Forward:
    """Return the function that runs forwards of `model`: each size and seed once, all seeds of a size on one batch."""
    build_batch = cache(workload.build_batch)

    @cache
    def forward(size: int, seed: int) -> tuple[int, bool]:
        device = model_device(model)
        batch = move_batch(build_batch(size), device)
        seed_everything(seed)
        host = _host_draws()
        torch.clear_autocast_cache()
        with DrawRecorder() as recorder, autocast(workload.precision, device):
            terms = workload.objective.terms(model, batch)
            held_bytes: int = recorder.alive_bytes
        del terms
        return held_bytes, recorder.decides or _host_draws() != host

    return forward


def describe_environment(device: torch.device) -> Mapping[str, Any]:
    """Return versions, processor, threads and allocator settings; on a card also CUDA, cuDNN and their settings."""
    is_card, cudnn = device.type == "cuda", cast("Any", torch.backends.cudnn)
    return {
        **read_environment((*HOST_VARIABLES, *(CARD_VARIABLES if is_card else ()))),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **({"cuda": torch.version.cuda, "cudnn": cudnn.version()} if is_card else {}),
    }
