"""`verify` of a training command: its update in parts against the one by a single micro-batch, from inside of both.

The command runs twice with the same samples and random numbers, up to its first optimizer step: the target batch as one
micro-batch, and in parts. What makes the runs comparable is in `devices.command.gradient_watch`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoaccum.checks import read_count
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.command.command_runs import CommandRun, check_ran, command_environment, inspection_of
from autoaccum.devices.command.observations import Observations
from autoaccum.devices.command.settings import ProcessReport
from autoaccum.devices.device_choice import check_named_device
from autoaccum.devices.inspection import name_dtype
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.serialization import to_plain
from autoaccum.sources.command import ITER_SIZE, CommandSource, describe_missing
from autoaccum.verification.verification_result import Cause, Comparison, Difference, Verification

_SMALL = 1e-2
"""The share of the whole gradient's norm below which a tensor's difference is measured by that share: of a tensor whose
gradient is zero but for rounding, such as the bias below a normalisation, all is rounding."""
_SAME_FACTOR = 1e-2
_SAME_ROW = 1e-5
_SURE = 4
"""Weights of parts are sought in so many times as many entries at least; fewer would fit by chance."""


def verify_command(
    source: CommandSource,
    options: Options,
    *,
    target_batch: int,
    micro_batch: int | None = None,
) -> Verification:
    """Compare the update of a command by one micro-batch with that in parts, as `autoaccum.verify` explains.

    Raises:
        UsageError: The command has no place for the number of parts, or there are no such parts.
        WorkloadError: The script fails, or does not take its sizes.
        NotMeasuredError: It makes no update, or its gradient cannot be read.
    """
    target, ranks = read_count(target_batch, "target_batch"), options.world_size
    if not source.takes_iter_size:
        raise UsageError(
            f"{describe_missing(source.name, ITER_SIZE)}, and one update would be one micro-batch",
            hint=f"write {ITER_SIZE} where the command takes its accumulation steps",
        )
    check_named_device(options.device)
    if target % ranks:
        raise UsageError(f"target_batch is {target}, and {ranks} ranks cannot share it", hint="give a multiple")
    samples = target // ranks
    micro = next(size for size in range(max(samples // 4, 1), 0, -1) if samples % size == 0)
    if micro_batch is not None:
        micro = read_count(micro_batch, "micro_batch")
    if micro >= samples or samples % micro:
        raise UsageError(
            f"micro_batch is {micro}, and an update has {samples} samples: it takes two or more equal parts",
            hint="give a micro-batch that divides it",
        )
    return _CommandCheck(source, options, samples, micro).run()


@dataclass(frozen=True)
class FirstUpdate:
    """What a run kept of its first update (`GradientWatch.save`).

    Attributes:
        gradients: The gradients by the names of their parameters.
        parts: What each backward pass added to them, of those parameters for which there was room.
        rows: Numbers that tell apart the samples that the models were called with, one row for each.
        draws: Whether a model drew random numbers.
    """

    gradients: Mapping[str, Tensor]
    parts: Mapping[str, list[Tensor]]
    rows: Tensor
    draws: bool

    def named_as(self, other: FirstUpdate) -> FirstUpdate:
        """Return this update with another's names, if it only called a module within the other's, or around it."""
        names = dict(zip(self.gradients, other.gradients, strict=False))
        is_same = len(self.gradients) == len(other.gradients) and all(
            mine.endswith(name) or name.endswith(mine) for mine, name in names.items()
        )
        if not is_same:
            return self
        gradients = {names[name]: each for name, each in self.gradients.items()}
        parts = {names.get(name, name): each for name, each in self.parts.items()}
        return replace(self, gradients=gradients, parts=parts)


@dataclass(frozen=True)
class UpdatePair:
    """The update of the whole batch as one micro-batch, and the one in `count` parts."""

    whole: FirstUpdate
    split: FirstUpdate
    count: int

    @cached_property
    def norm(self) -> float:
        """The norm of the whole batch's gradient."""
        return math.hypot(*(float(each.double().norm()) for each in self.whole.gradients.values()))

    @property
    def names(self) -> list[str]:
        """The tensors that have a gradient in one of the runs."""
        return list(dict.fromkeys((*self.whole.gradients, *self.split.gradients)))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The coarsest dtype of the gradients."""
        kinds = {each.dtype for each in self.whole.gradients.values()}
        return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)

    @property
    def tolerance(self) -> float:
        """The root of the machine epsilon of this dtype: half of its digits.

        Sums in another order differ in the last digits, and more where large terms cancel.
        """
        return math.sqrt(torch.finfo(self.dtype).eps)

    def error(self, name: str, factor: float = 1.0, found: Tensor | None = None) -> float:
        """Return how far the gradient in parts, or another, is from `factor` times the whole batch's.

        That is relative to its norm, or to a hundredth of the norm of all gradients if that is more. It is infinite
        where one run has no gradient.
        """
        whole, split = self.whole.gradients.get(name), self.split.gradients.get(name) if found is None else found
        if whole is None or split is None or whole.numel() != split.numel():
            return math.inf
        right = factor * whole.double().flatten()
        scale = max(float(right.norm()), _SMALL * factor * self.norm) or 1.0
        error = float((split.double().flatten() - right).norm()) / scale
        return error if math.isfinite(error) else math.inf

    def unequal(self, factor: float = 1.0) -> list[str]:
        """Return the tensors whose gradient is not `factor` times the whole batch's."""
        return [name for name in self.names if self.error(name, factor) > self.tolerance]

    def same_samples(self) -> int:
        """Return how many samples of the whole batch are among those of the parts, but for rounding."""
        whole, split = self.whole.rows, self.split.rows
        if not len(whole) or not len(split):
            return 0
        close = _SAME_ROW * whole.abs().amax(0)
        return int(torch.stack([((row - split).abs() <= close).any(0) for row in whole]).sum(0).max())

    def scaled(self) -> tuple[float, list[str]] | None:
        """Return the factor that some gradients are off by where all others are equal, and their names."""
        wrong = self.unequal()
        whole, split = (run.gradients.get(wrong[0], torch.zeros(1)).norm() for run in (self.whole, self.split))
        for factor in (float(self.count), 1 / self.count, float(split / whole)):
            if math.isfinite(factor) and factor > 0 and not set(wrong) & set(self.unequal(factor)):
                return factor, wrong
        return None

    def weighted(self) -> tuple[float, list[float]] | None:
        """Return what each part counts for, and what they would have to, if other weights make the gradients equal.

        That is found in the gradients of each part, which are kept of as many tensors as there is memory for.
        """
        sums: dict[str, Tensor] = {}
        for name, parts in self.split.parts.items():
            if name in self.whole.gradients and len(parts) % self.count == 0:  # Else the passes are not the parts.
                sums[name] = torch.stack(parts).double().reshape(self.count, -1, parts[0].numel()).sum(1)
        if sum(each.shape[1] for each in sums.values()) < _SURE * self.count:
            return None
        products = torch.stack([each @ each.T for each in sums.values()]).sum(0)
        toward_whole, toward_split = (
            torch.stack([each @ run.gradients[name].double().flatten() for name, each in sums.items()]).sum(0)
            for run in (self.whole, self.split)
        )
        weights = torch.linalg.lstsq(products, toward_whole[:, None]).solution[:, 0]
        if not bool((weights > 0).all()):
            return None
        if any(self.error(name, found=weights @ each) > self.tolerance for name, each in sums.items()):
            return None
        scale = float(toward_split.sum() / products.sum() / weights.sum())
        return scale, (weights / weights.sum()).tolist()


class _CommandCheck:
    """Runs a command, and says what the difference of its gradients means."""

    def __init__(self, source: CommandSource, options: Options, samples: int, micro: int) -> None:
        self._settings = TrialSettings(source=source, rank_samples=samples, options=options)
        self._whole, self._split = (samples,), (micro,) * (samples // micro)
        self._began = time.monotonic()
        self._observations = Observations(self._settings)
        device = options.device
        visible = "" if device == "cpu" else command_environment(device).get("CUDA_VISIBLE_DEVICES")
        cards = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        self._environment = {"TORCHDYNAMO_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0", **cards}

    def run(self) -> Verification:
        """Run it twice, and twice more if BatchNorm may be the cause."""
        pair, (whole, split) = self._run_pair()
        told = self._observations.check(self._whole, whole)
        if (ignored := self._find_ignored(whole, split)) is not None:
            return self._answer(pair, whole, ignored)
        if (told := told or self._observations.check(self._split, split)) is not None:
            raise told
        if pair.norm == 0 or not math.isfinite(pair.norm):
            seen = "zero" if pair.norm == 0 else "not finite"
            return self._answer(pair, whole, message("command_no_gradient", seen=seen))
        if not pair.unequal():
            return self._answer(pair, whole)
        if cause := _explain(pair):
            return self._answer(pair, whole, cause)
        if (reason := _find_incomparable(pair)) is not None:
            return self._answer(pair, whole, reason)
        return self._answer(pair, whole, *self._without_batchnorm(pair, whole.batchnorms))

    def _run_pair(self, **watch: Any) -> tuple[UpdatePair, list[ProcessReport]]:
        """Run the command by one micro-batch and in parts, each to its first update.

        Raises:
            WorkloadError: The script fails.
            NotMeasuredError: It makes no update, takes too long, or needs too much memory.
        """
        updates, reports = list[FirstUpdate](), list[ProcessReport]()
        limit = self._settings.options.time_limit if watch else None
        for parts in (self._whole, self._split):
            told = {"updates": 1, "compares": True, **watch}
            with closing(CommandRun(self._settings, parts, limit, environment=self._environment, **told)) as run:
                owner = self._settings.options.device
                try:
                    reports.append(check_ran(*run.finish(owner), owner))
                except DoesNotFitError as error:
                    raise NotMeasuredError(error.message, hint="give a smaller --target-batch") from error
                if not run.watch.gradients.exists():
                    raise NotMeasuredError("the script's first update has no gradient")
                updates.append(FirstUpdate(**torch.load(run.watch.gradients, weights_only=True)))
        whole, split = updates
        return UpdatePair(whole, split.named_as(whole), len(self._split)), reports

    def _find_ignored(self, whole: ProcessReport, split: ProcessReport) -> Cause | None:
        """Return the cause where the command does not heed its number of parts."""
        passes, expected = sum(split.backwards), sum(whole.backwards) * len(self._split)
        if passes == expected:
            return None
        option = self._observations.iter_option
        found = message("command_ignored", passes=passes, expected=expected, option=option)
        return Cause(kind="accumulate", found=found, change=message("command_heed"))

    def _without_batchnorm(self, pair: UpdatePair, layers: tuple[str, ...]) -> tuple[Cause, ...]:
        """Return the causes that two runs show in which BatchNorm normalises by its running statistics."""
        tensor = pair.unequal()[0]
        found, change = message("unexplained", tensor=tensor, reason=""), message("narrow_down")
        others: tuple[Cause, ...] = (Cause(kind="unknown", found=found, change=change, where=(tensor,)),)
        if not layers:
            return others
        proved = False
        with suppress(AutoaccumError):  # It is known already that they differ.
            frozen, _ = self._run_pair(freezes_batchnorm=True)
            cause = _explain(frozen) if frozen.unequal() else None
            if cause is not None or not frozen.unequal():
                proved, others = True, () if cause is None else (cause,)
        found = message("batchnorm_by_parts", modules=list(layers))
        change = message("take_batchnorm_mode", mode="frozen")
        return (Cause(kind="batchnorm", found=found, change=change, where=layers, proved=proved), *others)

    def _answer(self, pair: UpdatePair, report: ProcessReport, *why: Cause | Message) -> Verification:
        """Return the result: a message says why nothing can be compared."""
        options, seen = self._settings.options, inspection_of(self._settings, report)
        notes = tuple(each for each in why if isinstance(each, Message))
        unequal, worst = pair.unequal(), max(pair.names, key=pair.error, default=None)
        gradients = Difference(
            quantity="gradients",
            compared=len(pair.names),
            error=0.0 if worst is None else pair.error(worst),
            where=worst,
            tolerance=pair.tolerance,
            equal=not why,
            first=unequal[0] if unequal else None,
        )
        compared = Comparison(method="command", window="whole", micro_batches=self._split, differences=(gradients,))
        return Verification(
            equivalent=not why,
            target_batch=sum(self._whole) * options.world_size,
            micro_batch=self._split[0],
            precision=name_dtype(pair.dtype),
            device=options.device,
            batchnorm="micro",
            tolerance=pair.tolerance,
            comparisons=() if notes else (compared,),
            causes=tuple(each for each in why if isinstance(each, Cause)),
            notes=notes,
            workload=to_plain(seen.workload),
            environment=seen.environment,
            seconds=time.monotonic() - self._began,
            world_size=options.world_size,
        )


def _explain(pair: UpdatePair) -> Cause | None:
    """Return the cause that the gradients themselves show."""
    where: tuple[str, ...] = ()
    if (scaled := pair.scaled()) is not None:
        factor, names = scaled
        where = tuple(names) if len(names) < len(pair.names) else ()
        found = message("command_scaled", factor=factor, parts=pair.count, tensors=list(where))
        change = message("command_scale_some", tensors=list(where)) if where else message("command_divide_once")
    elif (weighted := pair.weighted()) is not None:
        counts, shares = weighted
        mistake = "mean of means" if abs(pair.count * counts - 1) < _SAME_FACTOR else "weights"
        found = message("parts_count", mistake=mistake, factors=[counts] * pair.count, shares=shares)
        change = message("divide_parts", divisor="the entries that count, such as tokens", over_ranks=False)
    else:
        return None
    return Cause(kind="accumulate", found=found, change=change, where=where, proved=True)


def _find_incomparable(pair: UpdatePair) -> Message | None:
    """Return why a difference says nothing; None if it does."""
    samples, same = len(pair.whole.rows), pair.same_samples()
    if not samples:
        return message("command_unseen_samples")
    if not same == samples == len(pair.split.rows):
        return message("command_other_samples", same=same, samples=samples)
    return message("command_draws") if pair.whole.draws or pair.split.draws else None
