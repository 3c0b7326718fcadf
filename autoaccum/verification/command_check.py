"""`verify` of a training command: its update in parts against the one by a single micro-batch, from inside of both.

The command runs twice with the same samples and random numbers, up to its first optimizer step: the target batch as one
micro-batch, and in parts. What makes the runs comparable is in `devices.command.gradient_watch`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from autoaccum.checks import read_count
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.command.command_runs import (
    CommandRun,
    Observations,
    command_environment,
    inspection_of,
)
from autoaccum.devices.command.settings import ProcessReport
from autoaccum.devices.device_choice import check_device
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.serialization import freeze, to_plain
from autoaccum.sources.command import ITER_SIZE, CommandSource
from autoaccum.verification.verification_result import Cause

_SCHEMA = 1
_SMALL = 1e-2
"""The share of the whole gradient's norm below which a tensor's difference is measured by that share: of a tensor whose
gradient is zero but for rounding, such as the bias below a normalisation, all is rounding."""
_SAME_FACTOR = 1e-2
_SAME_ROW = 1e-5
_SURE = 4
"""Weights of parts are sought in so many times as many entries at least; fewer would fit by chance."""


@dataclass(frozen=True, kw_only=True)
class CommandVerification:
    """Whether a training command accumulates rightly.

    Attributes:
        answer: `equal`, `different`, or `undecided` where the runs cannot be compared.
        target_batch: Samples of an update, over all ranks.
        micro_batches: Its parts, in samples of a rank.
        device: `cpu` or `cuda:N`.
        compared: The number of tensors.
        error: The largest difference of a tensor's gradient, relative to its norm, or to a hundredth of the whole
            gradient's norm if that is more. Infinite where one run has no gradient; None if nothing was compared.
        where: The tensor with the largest difference.
        tolerance: The largest difference that rounding explains.
        causes: Why they differ.
        notes: Why nothing can be said, and what was noticed.
        workload: Name, digest, model, parameters and words of the command.
        environment: Versions of Python, PyTorch and so on.
        seconds: The time it took.
        schema: The version of the record.
    """

    answer: Literal["equal", "different", "undecided"]
    target_batch: int
    micro_batches: tuple[int, ...]
    device: str
    compared: int
    error: float | None
    where: str | None
    tolerance: float
    causes: tuple[Cause, ...]
    notes: tuple[Message, ...]
    workload: Mapping[str, Any]
    environment: Mapping[str, Any]
    seconds: float
    schema: int = _SCHEMA

    def __post_init__(self) -> None:
        for name in ("workload", "environment"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    @property
    def equivalent(self) -> bool:
        """Whether the gradients are equal."""
        return self.answer == "equal"

    @property
    def exit_code(self) -> int:
        """0: equal; 1: different; 3: undecided."""
        return {"equal": 0, "different": 1, "undecided": 3}[self.answer]

    def to_json(self) -> str:
        """Return the record as indented JSON, the schema first; an infinite error is null."""
        record = to_plain(self)
        plain = json.dumps({"schema": record.pop("schema"), **record})
        return json.dumps(json.loads(plain, parse_constant=lambda constant: None), indent=2) + "\n"


def verify_command(
    source: CommandSource,
    options: Options,
    *,
    target_batch: int,
    micro_batch: int | None = None,
) -> CommandVerification:
    """Compare the update of a command by one micro-batch with that in parts, as `autoaccum.verify` explains.

    Raises:
        UsageError: The command has no place for the number of parts, or there are no such parts.
        WorkloadError: The script fails, or does not take its sizes.
        NotMeasuredError: It makes no update, or its gradient cannot be read.
    """
    target, ranks = read_count(target_batch, "target_batch"), options.world_size
    if not source.takes_iter_size:
        raise UsageError(
            f"the command has no {ITER_SIZE}, and one update would be one micro-batch",
            hint=f"write {ITER_SIZE} where the command takes its accumulation steps",
        )
    if options.device == "auto":
        raise UsageError("there is no device 'auto' to verify on", hint="take cpu, cuda or cuda:N")
    check_device(options.device)
    if target % ranks:
        raise UsageError(f"target_batch is {target}, and {ranks} ranks cannot share it", hint="give a multiple")
    samples = target // ranks
    quarter = next((size for size in range(max(samples // 4, 1), 0, -1) if samples % size == 0), 1)
    micro = quarter if micro_batch is None else read_count(micro_batch, "micro_batch")
    if micro >= samples or samples % micro:
        raise UsageError(
            f"micro_batch is {micro}, and an update has {samples} samples: it takes two or more equal parts",
            hint="give a micro-batch that divides it",
        )
    return _CommandCheck(source, options, samples, micro).run()


@dataclass(frozen=True)
class _Run:
    """What a run reported, and the gradients of its first update."""

    report: ProcessReport
    gradients: Mapping[str, Tensor]
    parts: Mapping[str, list[Tensor]]
    rows: Tensor
    draws: bool

    @cached_property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return math.hypot(*(float(each.double().norm()) for each in self.gradients.values()))


@dataclass(frozen=True)
class _Pair:
    """The run of the whole batch and the one in `count` parts."""

    whole: _Run
    split: _Run
    count: int

    @property
    def names(self) -> list[str]:
        """The tensors that have a gradient in one of the runs."""
        return list(dict.fromkeys((*self.whole.gradients, *self.split.gradients)))

    @property
    def lone(self) -> list[str]:
        """The tensors that have one in only one of them."""
        return sorted(set(self.whole.gradients) ^ set(self.split.gradients))

    @cached_property
    def tolerance(self) -> float:
        """The root of the machine epsilon of the gradients' coarsest dtype: half of its digits.

        Sums in another order differ in the last digits, and more where large terms cancel.
        """
        kinds = {each.dtype for each in self.whole.gradients.values()}
        return math.sqrt(max((torch.finfo(kind).eps for kind in kinds), default=0.0))

    def error(self, name: str, factor: float = 1.0, found: Tensor | None = None) -> float:
        """Return how far the gradient in parts, or another, is from `factor` times the whole batch's."""
        whole, split = self.whole.gradients.get(name), self.split.gradients.get(name) if found is None else found
        if whole is None or split is None or whole.numel() != split.numel():
            return math.inf
        right = factor * whole.double().flatten()
        scale = max(float(right.norm()), _SMALL * factor * self.whole.norm)
        error = float((split.double().flatten() - right).norm()) / scale
        return error if math.isfinite(error) else math.inf

    def unequal(self, factor: float = 1.0) -> list[str]:
        """Return the tensors whose gradient is not `factor` times the whole batch's."""
        return [name for name in self.names if self.error(name, factor) > self.tolerance]

    def same_rows(self) -> int:
        """Return how many samples of the whole batch are among those of the parts."""
        return max(map(_count_near, self.whole.rows.T.contiguous(), self.split.rows.T.contiguous()))

    def scaled(self) -> tuple[float, list[str]] | None:
        """Return the factor that some gradients are off by where all others are equal, and their names."""
        wrong = self.unequal()
        first = next((name for name in wrong if name not in self.lone), None)
        factors = [float(self.count), 1 / self.count]
        if first is not None:
            factors.append(float(self.split.gradients[first].norm() / self.whole.gradients[first].norm()))
        for factor in factors:
            if math.isfinite(factor) and factor > 0 and not set(wrong) & set(self.unequal(factor)):
                return factor, wrong
        return None

    def weighted(self) -> tuple[float, list[float]] | None:
        """Return what each part counts for, and what they would have to, if other weights make the gradients equal.

        That is found in the gradients of each part, which are kept of as many tensors as there is memory for.
        """
        sums: dict[str, Tensor] = {}
        for name in self.whole.parts.keys() & self.split.parts.keys() - set(self.lone):
            passes, parts = len(self.whole.parts[name]), self.split.parts[name]
            if len(parts) == passes * self.count:
                sums[name] = torch.stack(parts).double().reshape(self.count, passes, -1).sum(1)
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


def _count_near(whole: Tensor, split: Tensor) -> int:
    """Return how many numbers are among others, but for rounding."""
    if not len(whole) or not len(split):
        return 0
    ordered = split.sort().values
    at = torch.searchsorted(ordered, whole).clamp(max=len(ordered) - 1)
    apart = torch.minimum((ordered[at] - whole).abs(), (ordered[(at - 1).clamp(min=0)] - whole).abs())
    return int((apart <= _SAME_ROW * whole.abs().max()).sum())


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

    def run(self) -> CommandVerification:
        """Run it twice, and twice more if BatchNorm may be the cause."""
        whole = self._run(self._whole)
        split = self._run(self._split)
        pair = _Pair(whole, split, len(self._split))
        told, ignored = self._observations.check(self._whole, whole.report), self._find_ignored(pair)
        if ignored is not None:
            return self._answer(pair, "different", (ignored,))
        if (told := told or self._observations.check(self._split, split.report)) is not None:
            raise told
        if pair.whole.norm == 0 or not math.isfinite(pair.whole.norm):
            seen = "zero" if pair.whole.norm == 0 else "not finite"
            return self._answer(pair, "undecided", notes=[message("command_no_gradient", seen=seen)])
        if not pair.unequal():
            return self._answer(pair, "equal")
        causes = self._explain(pair)
        if not causes and (reason := self._incomparable(pair)) is not None:
            return self._answer(pair, "undecided", notes=[reason])
        return self._answer(pair, "different", causes or self._without_batchnorm(pair))

    def _run(self, parts: tuple[int, ...], *, limit_seconds: float | None = None, frozen: bool = False) -> _Run:
        """Run the command to its first update.

        Raises:
            WorkloadError: The script fails.
            NotMeasuredError: It makes no update, or takes too long.
        """
        told = {"updates": 1, "compares": True, "freezes_batchnorm": frozen}
        with closing(CommandRun(self._settings, parts, limit_seconds, environment=self._environment, **told)) as run:
            trial, report = run.finish(self._settings.options.device)
            if not trial.ran or report is None:
                if trial.fault == "user":
                    raise WorkloadError(trial.message or "", user_traceback=trial.traceback)
                raise NotMeasuredError(trial.message or "")
            if not run.watch.gradients.exists():
                raise NotMeasuredError("the script's first update has no gradient")
            record = torch.load(run.watch.gradients, weights_only=True)
        return _Run(report, **record)

    def _find_ignored(self, pair: _Pair) -> Cause | None:
        """Return the cause where the command does not heed its number of parts."""
        whole, split = (run.report.backwards[-1] if run.report.backwards else 0 for run in (pair.whole, pair.split))
        if not whole or split == whole * pair.count:
            return None
        found = message(
            "command_ignored", passes=split, expected=whole * pair.count, option=self._observations.iter_option
        )
        return Cause(kind="accumulate", found=found, change=message("command_heed"))

    def _explain(self, pair: _Pair) -> tuple[Cause, ...]:
        """Return the cause that the gradients themselves show."""
        if (scaled := pair.scaled()) is not None:
            factor, names = scaled
            where = tuple(names) if len(names) < len(pair.names) else ()
            found = message("command_scaled", factor=factor, parts=pair.count, tensors=list(where))
            change = message("command_divide_once")
            return (Cause(kind="accumulate", found=found, change=change, where=where, proved=True),)
        if (weighted := pair.weighted()) is not None:
            counts, shares = weighted
            mistake = "mean of means" if abs(pair.count * counts - 1) < _SAME_FACTOR else "weights"
            found = message("parts_count", mistake=mistake, factors=[counts] * pair.count, shares=shares)
            change = message("divide_parts", divisor="the entries that count, such as tokens", over_ranks=False)
            return (Cause(kind="accumulate", found=found, change=change, proved=True),)
        return ()

    def _incomparable(self, pair: _Pair) -> Message | None:
        """Return why a difference says nothing; None if it does."""
        whole, split, same = len(pair.whole.rows), len(pair.split.rows), pair.same_rows()
        if not whole:
            return message("command_unseen_samples")
        if not same == whole == split:
            return message("command_other_samples", same=same, samples=whole)
        return message("command_draws") if pair.whole.draws or pair.split.draws else None

    def _without_batchnorm(self, pair: _Pair) -> tuple[Cause, ...]:
        """Return the causes that two runs show in which BatchNorm normalises by its running statistics."""
        layers, tensor = pair.whole.report.batchnorms, pair.unequal()[0]
        found, change = message("unexplained", tensor=tensor, reason=""), message("narrow_down")
        unknown = Cause(kind="unknown", found=found, change=change, where=(tensor,))
        if not layers:
            return (unknown,)
        others: tuple[Cause, ...] = (unknown,)
        proved = False
        limit = self._settings.options.time_limit
        with suppress(AutoaccumError):  # It is known already that they differ.
            whole, split = (self._run(parts, limit_seconds=limit, frozen=True) for parts in (self._whole, self._split))
            frozen = _Pair(whole, split, pair.count)
            explained = self._explain(frozen) if frozen.unequal() else ()
            proved = bool(explained) or not frozen.unequal()
            others = explained if proved else others
        found, change = (
            message("batchnorm_by_parts", modules=list(layers)),
            message("take_batchnorm_mode", mode="frozen"),
        )
        return (Cause(kind="batchnorm", found=found, change=change, where=layers, proved=proved), *others)

    def _answer(
        self,
        pair: _Pair,
        answer: Literal["equal", "different", "undecided"],
        causes: tuple[Cause, ...] = (),
        notes: Sequence[Message] = (),
    ) -> CommandVerification:
        options, report = self._settings.options, pair.whole.report
        seen = inspection_of(self._settings, report)
        compared = [] if answer == "undecided" else pair.names
        worst = max(compared, key=pair.error, default=None)
        lone = [message("command_lone_gradients", tensors=pair.lone)] if compared and pair.lone else []
        return CommandVerification(
            answer=answer,
            target_batch=sum(self._whole) * options.world_size,
            micro_batches=self._split,
            device=options.device,
            compared=len(compared),
            error=None if worst is None else pair.error(worst),
            where=worst,
            tolerance=pair.tolerance,
            causes=causes,
            notes=(*notes, *lone),
            workload=to_plain(seen.workload),
            environment=seen.environment,
            seconds=time.monotonic() - self._began,
        )
