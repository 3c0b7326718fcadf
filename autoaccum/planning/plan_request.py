"""The request for a plan: numbers and options, checked before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from autoaccum.accumulation.schedule import Schedule, even_parts, make_schedule, part_sizes
from autoaccum.checks import check_flag, check_word, read_count
from autoaccum.errors import UsageError
from autoaccum.options import Options, check_mesh

DEFAULT_LONGEST_OF = 64
"""The number of dataset samples whose longest make the batches of a workload without a `batch` of its own."""

Prefer = Literal["largest", "fastest"]
"""`largest`: the fewest micro-batches per update. `fastest`: the smallest within 2 % of the most samples per second, as
timed; for a simulated card by an estimate."""

_MIN_LOAD_SECONDS = 30.0
"""The least time to load and check the workload, whatever the time limit is: no plan is made without."""
_MAX_SAMPLES, _MAX_RANKS = 10_000_000, 100_000
_MOST_WITHOUT_TARGET = 1 << 16


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan.

    Attributes:
        target_batch: Samples per update, over all ranks; None: of a command, the largest micro-batch is the answer.
        target_tokens: Tokens per update, over all ranks: as many whole samples as reach them. `target_batch` is then
            the number to expect, once the lengths of samples are known.
        options: How the workload is to run.
        max_micro_batch: Try no larger size, in samples.
        fit_micro_batch: Choose savers, or solve for a value, with which the fewest parts of at most so many samples
            fit; None: with which one fits at all.
        max_trials: End the search after this many trials; the confirmation comes on top.
        exact_max: Find the largest size that fits to the sample, rather than the largest whose schedule is another.
        explain: Explain the memory at the peak, and what would change it.
        picture: Send the data of a memory picture to listeners, where the device has it.
        report: Send listeners all that a page shows: that data and the changes of `explain`, where the device has it.
        prefer: The micro-batch to take of those that fit (see `Prefer`).
        chooses_grad_sync: Sum gradients of a sharded model with the last part where that fits; else always with each.
        solve: The values to try of one name that `Options.overrides` could set; the largest that fits is planned.

    Raises:
        UsageError: A number is no whole number of at least 1, or is too large (a schedule lists all its parts), or
            equal parts do not divide the target, or a flag is neither True nor False.
    """

    target_batch: int | None
    options: Options = field(default_factory=Options)
    max_micro_batch: int | None = None
    max_trials: int | None = None
    exact_max: bool = False
    explain: bool = False
    picture: bool = False
    report: bool = False
    prefer: Prefer = "largest"
    chooses_grad_sync: bool = True
    fit_micro_batch: int | None = None
    solve: Mapping[str, range] | None = None
    target_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, number, most in (
            ("target batch", self.target_batch, _MAX_SAMPLES),
            ("world size", self.options.world_size, _MAX_RANKS),
        ):
            if isinstance(number, int) and number > most:
                raise UsageError(f"the {name} is beyond {most:,}", hint="take a smaller one")
        if self.target_tokens is not None:
            read_count(self.target_tokens, "target_tokens")
            if self.solve is not None:
                raise UsageError("--solve cannot be combined with --target-tokens", hint="give --target-batch")
        _check_ranks(self.options)
        self.schedule(self.multiple_of if self.max_micro_batch is None else self.max_micro_batch)
        if self.max_trials is not None:
            read_count(self.max_trials, "max_trials")
        if self.fit_micro_batch is not None:
            read_count(self.fit_micro_batch, "fit_micro_batch")
            if not self.options.chooses_savers and self.solve is None:
                raise UsageError(
                    f"--fit-micro-batch {self.fit_micro_batch} needs --savers auto or --solve",
                    hint=f"add one of them, or try no larger size by --max-micro-batch {self.fit_micro_batch}",
                )
        if self.solve is not None:
            _check_solve(self.solve, self)
        check_word(self.prefer, "prefer", get_args(Prefer))
        if self.prefer == "fastest" and self.options.world_size > 1:
            raise UsageError(
                "prefer fastest (--prefer fastest) times one process, and there are"
                f" {self.options.world_size} ranks, which would wait for each other",
                hint="leave it out, or plan for one rank",
            )
        for flag in ("exact_max", "explain", "picture", "report"):
            check_flag(getattr(self, flag), flag)

    @property
    def rank_samples(self) -> int:
        """Samples per update on the rank with the longest share."""
        if self.target_batch is None:
            return self.max_micro_batch or _MOST_WITHOUT_TARGET
        return even_parts(self.target_batch // self.multiple_of, self.options.world_size)[0] * self.multiple_of

    @property
    def multiple_of(self) -> int:
        """The number that every micro-batch is a multiple of, as far as it is known."""
        return self.options.spec.get("multiple_of") or 1

    @property
    def load_limit_seconds(self) -> float | None:
        """The seconds that loading and checking the workload may take; None: as long as every trial."""
        limit = self.options.time_limit
        return None if limit is None else max(limit, _MIN_LOAD_SECONDS)

    @property
    def cap(self) -> int:
        """The largest size worth trying."""
        most = min(self.rank_samples, self.max_micro_batch or self.rank_samples)
        return most - most % self.multiple_of

    def sizes(self, least_size: int) -> Sequence[int]:
        """Return the sizes worth trying, from `least_size` to `cap`: those that the largest micro-batch can have.

        Between two of them every ceiling gives the same schedule; they are all sizes if the ceiling is to be found.

        Raises:
            UsageError: The cap is less than `least_size`.
        """
        if self.cap < least_size:
            raise UsageError(
                f"the largest micro-batch to try is {self.cap}, the least that can be trained is {least_size}",
                hint="give a larger one",
            )
        each = self.multiple_of
        if self.exact_max or self.target_batch is None:
            return range(least_size, self.cap + 1, each)
        sizes = part_sizes(self.rank_samples, self.cap, equal=self.options.equal, multiple_of=each)
        trainable = [size for size in sizes if size >= least_size]
        if not trainable:
            raise UsageError(
                f"equal parts of {self.rank_samples} samples, of at most {self.cap}, are smaller than {least_size},"
                " the least that can be trained",
                hint="allow larger ones, or uneven parts (without --equal)",
            )
        return trainable

    def size_to_fit(self, wanted: int | None, least_size: int) -> int:
        """Return the micro-batch that has to fit: that of the schedule with parts of at most `wanted`, or the least.

        Raises:
            UsageError: It cannot be tried.
        """
        sizes = self.sizes(least_size)
        if wanted is not None and not sizes[0] <= wanted <= self.cap:
            raise UsageError(
                f"a micro-batch of {wanted} is to fit, and sizes from {sizes[0]} to {self.cap} can be tried",
                hint="give one of them (--fit-micro-batch)",
            )
        return sizes[0] if wanted is None else self.schedule(wanted).micro_batch

    def with_multiple_of(self, multiple_of: int) -> PlanRequest:
        """Return the request with the `multiple_of` that an inspection found."""
        if multiple_of == self.multiple_of:
            return self
        return dataclasses.replace(self, options=self.options.with_spec(multiple_of=multiple_of))

    def ladder(self, ceiling: int, least_size: int) -> tuple[int, ...]:
        """Return the sizes whose speed is worth knowing: the largest parts of schedules, in different numbers of parts.

        They are the schedules of doublings of `least_size`, and of `ceiling`, whose parts are no smaller than that.
        """
        doublings = [least_size << times for times in range(ceiling.bit_length()) if least_size << times < ceiling]
        sizes: dict[int, int] = {}
        for schedule in map(self.schedule, (*doublings, ceiling)):
            if schedule.smallest_part >= least_size:
                sizes.setdefault(schedule.iter_size, schedule.micro_batch)
        return tuple(sizes.values())

    def schedule(self, ceiling: int) -> Schedule:
        """Cut the target into the fewest parts of at most `ceiling` samples; without one, an update is one part."""
        if self.target_batch is None:
            return Schedule(((ceiling,),) * self.options.world_size)
        return make_schedule(
            self.target_batch,
            ceiling,
            world_size=self.options.world_size,
            equal=self.options.equal,
            multiple_of=self.multiple_of,
        )


def _check_solve(solve: Mapping[str, range], request: PlanRequest) -> None:
    """Raise UsageError unless one name has values to try, and nothing else looks for what fits."""
    pairs = list(solve.items()) if isinstance(solve, Mapping) else []
    name, values = pairs[0] if len(pairs) == 1 else ("", None)
    if not (name.isidentifier() and isinstance(values, range) and values and values[0] > 0 < values.step):
        raise UsageError(
            f"solve is {solve!r}",
            hint='give one name and ascending values from 1 on: {"length": range(512, 8193, 128)}, or --solve'
            " length=512..8192:128",
        )
    if name in request.options.overrides:
        raise UsageError(f"{name} is set (--set), and is to be found (--solve)", hint="leave one of them out")
    if request.options.chooses_savers or request.max_micro_batch is not None:
        raise UsageError(
            "--solve cannot be combined with --savers auto or --max-micro-batch",
            hint="name the savers, and give the micro-batch that has to fit by --fit-micro-batch",
        )


def _check_ranks(options: Options) -> None:
    """Raise UsageError where the mesh has another number of ranks, or where trials on real devices cannot shard."""
    if options.mesh is not None:
        check_mesh(options.mesh, options.world_size)
    if options.gpu is None and (options.parallel == "fsdp2" or len(options.mesh or ()) > 1):
        raise UsageError(
            "trials on a device of this machine run the whole model, and fsdp2 shards it",
            hint="plan for a simulated card (--gpu NAME), and give that plan to fit",
        )
