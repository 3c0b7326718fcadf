"""The options of a run: one frozen record, made where arguments come in, and part of every request.

To add an option: a field here (and in `OptionArguments`, which types the keyword arguments), its flag in
`cli/flags.py`, and the place that honours it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, cast, get_args

from autoaccum.checks import check_flag, check_word, read_count, read_seconds
from autoaccum.errors import AutoaccumError, UsageError, WorkloadError
from autoaccum.units import MemorySize, parse_size

Precision = Literal["fp32", "bf16", "fp16"]
BatchNormMode = Literal["micro", "running", "frozen"]
"""`micro`: as PyTorch does it, each micro-batch for itself. `running`: normalised by the micro-batch, running
statistics updated as the full batch would. `frozen`: normalised by the running statistics, which stay as they are."""

AccumulateIn = Literal["fp32", "parameters"]
"""What gradients of half-precision parameters are summed in: `fp32`, to be rounded once, or the parameters' own dtype,
which takes no bytes beside them and rounds with each part."""

Keep = Literal["outputs", "ema"]
"""`outputs`: what the model returned for the last micro-batch, and its loss, as in a loop that logs them, until the
next micro-batch has its own. `ema`: an average of the weights on their device, and a copy of the buffers."""

BATCHNORM_MODES: Final[tuple[BatchNormMode, ...]] = get_args(BatchNormMode)
KEEPS: Final[tuple[Keep, ...]] = get_args(Keep)

Command = Literal["plan", "fit", "verify", "tune", "guard"]

WORKLOAD_OPTIONS: Final = (
    "optimizer",
    "precision",
    "batchnorm",
    "accumulate_in",
    "keeps",
    "evaluation_batch",
    "multiple_of",
)
"""Those that stand in for an attribute of the workload of the same name."""

_SEARCHING: Final = frozenset({"world_size", "equal", "gpu", "time_limit", "trial_limit"})
_NOT_TAKEN: Final[Mapping[Command, frozenset[str]]] = {
    "plan": frozenset(),
    "fit": _SEARCHING,
    "verify": _SEARCHING | {"memory", "reserve", "accumulate_in", "keeps", "evaluation_batch"},
    "tune": frozenset({"world_size", "equal", "gpu", "accumulate_in", "keeps", "evaluation_batch", "worst_of"}),
    "guard": frozenset({"trial_limit", "accumulate_in", "multiple_of"}),
}


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as keyword arguments."""

    optimizer: Any
    precision: str | None
    batchnorm: str | None
    accumulate_in: str | None
    keeps: str | Iterable[str] | None
    evaluation_batch: int | None
    worst_of: int | None
    multiple_of: int | None
    device: str
    gpu: str | None
    memory: str | MemorySize | None
    reserve: str | MemorySize | None
    world_size: int
    equal: bool
    time_limit: float | None
    trial_limit: float | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a workload is to run; what is None is as the workload has it, or as the machine is.

    Attributes:
        optimizer: A name of `torch.optim`; for live objects also a live optimizer, or what makes one.
        precision: `fp32`, `bf16` or `fp16`; of a verification also `fp64`.
        batchnorm: What BatchNorm sees and remembers of a batch in parts: `micro`, `running` or `frozen`.
        accumulate_in: What gradients of half-precision parameters are summed in: `fp32` or `parameters`.
        keeps: What training keeps beside the step: `outputs`, `ema`, or both.
        evaluation_batch: Samples of each pass of an evaluation between updates: it is part of every trial.
        worst_of: Make the batches of the longest of so many samples of the workload's dataset, by its `collate`.
        multiple_of: Every micro-batch is a multiple of so many samples, as is the target.
        device: `auto` (a card where there is one), `cpu`, `cuda` or `cuda:N`.
        gpu: The card to predict for, which need not be here: `rtx3090`, or a size such as `24GiB`. In place of
            `device`.
        memory: The budget: `10GiB`, `24GB`, or `80%` of the total; what is free otherwise.
        reserve: Kept free of it.
        world_size: Ranks that share the target; the longest share decides.
        equal: Equal micro-batches only.
        time_limit: Seconds that the search may take.
        trial_limit: Seconds after which a trial is given up.

    Raises:
        UsageError: One of them cannot be honoured.
    """

    optimizer: Any = None
    precision: str | None = None
    batchnorm: BatchNormMode | None = None
    accumulate_in: AccumulateIn | None = None
    keeps: tuple[Keep, ...] | None = None
    evaluation_batch: int | None = None
    worst_of: int | None = None
    multiple_of: int | None = None
    device: str = "auto"
    gpu: str | None = None
    memory: MemorySize | None = None
    reserve: MemorySize | None = None
    world_size: int = 1
    equal: bool = False
    time_limit: float | None = None
    trial_limit: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, "fp64"):
            check_word(self.precision, "precision", get_args(Precision))
        if self.batchnorm is not None:
            read_batchnorm_mode(self.batchnorm, UsageError)
        if self.accumulate_in is not None:
            read_accumulate_in(self.accumulate_in, UsageError)
        if self.keeps is not None:
            object.__setattr__(self, "keeps", read_keeps(self.keeps, UsageError))
        for name in ("evaluation_batch", "worst_of", "multiple_of", "world_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read_count(getattr(self, name), name))
        for name in ("time_limit", "trial_limit"):
            if getattr(self, name) is not None:
                read_seconds(getattr(self, name), f"the {name.replace('_', ' ')}")
        for name in ("memory", "reserve"):
            object.__setattr__(self, name, _read_size(getattr(self, name), name))
        check_flag(self.equal, "equal")
        self._check_place()

    @classmethod
    def of(cls, verb: Command, given: Mapping[str, Any]) -> Options:
        """The options of a call of `autoaccum.<verb>`.

        Raises:
            TypeError: There is no such argument, or `verb` has no use for it.
            UsageError: As `Options`.
        """
        known = {field.name for field in dataclasses.fields(cls)} - _NOT_TAKEN[verb]
        for name in given:
            if name not in known:
                raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}")
        if given.get("precision") is not None:
            finest = ("fp64",) if verb == "verify" else ()
            check_word(given["precision"], "precision", (*finest, *get_args(Precision)))
        return cls(**given)

    @property
    def overrides(self) -> dict[str, Any]:
        """What replaces attributes of a workload, by name; None: its own stays."""
        return {name: getattr(self, name) for name in WORKLOAD_OPTIONS}

    def to_record(self) -> dict[str, Any]:
        """What is not as it comes, as arguments for another process; the optimizer by its name, if it has one.

        >>> Options(gpu="rtx3090", memory=parse_size("80%"), keeps=("ema",)).to_record()
        {'keeps': ['ema'], 'gpu': 'rtx3090', 'memory': '80%'}
        """
        record = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        plain = {"keeps": list, "memory": str, "reserve": str}
        return {
            name: plain.get(name, lambda same: same)(value)
            for name, (value, default) in record.items()
            if value != default
        }

    def _check_place(self) -> None:
        if self.gpu is None:
            return
        if not isinstance(self.gpu, str):
            raise UsageError(
                f"gpu is {self.gpu!r}", hint='give the name of a card or a size with its unit: "rtx3090", "24GiB"'
            )
        if self.device != "auto":
            raise UsageError(
                f"both --device {self.device} and --gpu {self.gpu} are given",
                hint="--device measures on what is here, --gpu predicts for a card that need not be: take one",
            )


def read_batchnorm_mode(mode: Any, error: type[AutoaccumError] = WorkloadError) -> BatchNormMode:
    """A known mode of BatchNorm.

    Raises:
        WorkloadError: It is none; or `error`, where that is given.
    """
    check_word(mode, "batchnorm mode", BATCHNORM_MODES, error=error)
    return cast("BatchNormMode", mode)


def read_accumulate_in(word: Any, error: type[AutoaccumError] = WorkloadError) -> AccumulateIn:
    """A known way to sum gradients.

    Raises:
        WorkloadError: It is none; or `error`, where that is given.
    """
    check_word(word, "accumulate_in", get_args(AccumulateIn), error=error)
    return cast("AccumulateIn", word)


def read_keeps(keeps: Any, error: type[AutoaccumError] = WorkloadError) -> tuple[Keep, ...]:
    """Each word once, in the order of `KEEPS`, from one word or several.

    >>> read_keeps("ema"), read_keeps(["ema", "outputs", "ema"]), read_keeps(None)
    (('ema',), ('outputs', 'ema'), ())

    Raises:
        WorkloadError: A word is unknown, or it is no word; or `error`, where that is given.
    """
    if not isinstance(keeps, Iterable | None):
        raise error(f"keeps is {keeps!r}", hint=f"take {' or '.join(KEEPS)}, or a tuple of them")
    given = [keeps] if isinstance(keeps, str) else list(keeps or ())
    for word in given:
        check_word(word, "keeps", KEEPS, error=error)
    return tuple(keep for keep in KEEPS if keep in given)


def _read_size(size: Any, name: str) -> MemorySize | None:
    if size is None or isinstance(size, MemorySize):
        return size
    if isinstance(size, str):
        return parse_size(size)
    raise UsageError(f"{name} is {size!r}", hint='write its unit too, such as "10GiB" or "80%"')
