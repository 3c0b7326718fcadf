"""The options that the commands have in common: one frozen record, checked once, and part of every request.

To add an option, add a field to `Options` and to `OptionArguments`, a flag to `cli/flags.py`, and the code that uses
it; name it in `_NOT_TAKEN` for commands without it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, cast, get_args

from autoaccum.checks import check_flag, check_word, read_count, read_seconds
from autoaccum.errors import AutoaccumError, UsageError, WorkloadError
from autoaccum.units import MemorySize, parse_size

Precision = Literal["fp32", "bf16", "fp16"]
BatchNormMode = Literal["micro", "running", "frozen", "exact"]
"""`micro`: as in PyTorch, each micro-batch by itself. `running`: normalise by the micro-batch, but update the running
statistics as the full batch would. `frozen`: normalise by the running statistics and do not update them. `exact`:
normalise by the whole effective batch, as without accumulation; its activations wait in host memory."""

Joining = Literal["lockstep", "twice"]
"""How parts of an update run that need each other: in lock step, or forward twice, with the loss in between."""

AccumulateIn = Literal["fp32", "parameters"]
"""The dtype in which gradients of half-precision parameters are summed: `fp32`, rounded once at the end, or that of the
`parameters`, which needs no further memory and rounds with every micro-batch."""

Keep = Literal["outputs", "ema"]
"""`outputs`: the model's outputs and loss of a micro-batch stay alive until the next one has its own, as in a loop that
logs them. `ema`: an exponential moving average of the weights, with a copy of the buffers, on the same device."""

Parallel = Literal["ddp", "fsdp2"]
"""How several ranks train one model: `ddp`, each holds all of it, or `fsdp2`, each holds a shard."""

Reduce = Literal["each", "last"]
"""When FSDP2 sums the gradients of an update over ranks: with each micro-batch, or with the last."""

CHECKS: Final = ("warn", "strict", "off")
"""What training does if `weight` is not what the loss divides by: warn, raise an error, or not even check."""

RECOMPUTE: Final = "recompute"
OFFLOADS: Final = ("offload-activations", "offload-gradients", "offload-optimizer")
"""Savers, ways to take less memory of the device for the same gradient; `recompute=N` is for N blocks of the model."""
AUTO: Final = "auto"
"""In place of savers: a plan chooses them."""

BATCHNORM_MODES: Final[tuple[BatchNormMode, ...]] = get_args(BatchNormMode)
KEEPS: Final[tuple[Keep, ...]] = get_args(Keep)

_MESH = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)?", re.ASCII)

Command = Literal["plan", "compare", "fit", "verify", "tune", "guard", "explain"]

WORKLOAD_OPTIONS: Final = (
    "optimizer",
    "precision",
    "batchnorm",
    "coupled",
    "accumulate_in",
    "savers",
    "keeps",
    "evaluation_batch",
    "multiple_of",
)
"""Options that replace the attribute of the workload with the same name."""

_CHOOSING: Final = ("plan", "compare", "fit")
"""Commands that choose savers."""
_SEARCHING: Final = frozenset({"world_size", "equal", "gpu", "values", "time_limit", "trial_limit"})
_SHARDING: Final = frozenset({"parallel", "mesh"})
_NOT_TAKEN: Final[Mapping[Command, frozenset[str]]] = {
    "plan": frozenset(),
    "compare": frozenset({"device", "time_limit"}),
    "fit": _SEARCHING,
    "verify": (_SEARCHING - {"world_size", "time_limit"})
    | _SHARDING
    | {"memory", "reserve", "accumulate_in", "keeps", "evaluation_batch"},
    "tune": _SHARDING
    | {"world_size", "equal", "gpu", "values", "accumulate_in", "keeps", "evaluation_batch", "worst_of", "trial_limit"},
    "guard": frozenset({"device", "trial_limit", "accumulate_in", "multiple_of"}),
    "explain": _SHARDING
    | {"device", "memory", "reserve", "world_size", "equal", "time_limit", "trial_limit", "evaluation_batch"}
    | {"multiple_of"},
}


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as keyword arguments."""

    optimizer: Any
    precision: str | None
    batchnorm: str | None
    coupled: bool | None
    accumulate_in: str | None
    savers: str | Iterable[str] | None
    keeps: str | Iterable[str] | None
    evaluation_batch: int | None
    worst_of: int | None
    multiple_of: int | None
    device: str
    gpu: str | None
    values: str | None
    memory: str | MemorySize | None
    reserve: str | MemorySize | None
    world_size: int
    parallel: str | None
    mesh: str | Sequence[int] | None
    equal: bool
    time_limit: float | None
    trial_limit: float | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run; None means the workload's own value, or the default of the machine.

    Attributes:
        optimizer: A name in `torch.optim`; for live objects also an optimizer, or a function that makes one.
        precision: `fp32`, `bf16` or `fp16`; for `verify` `fp64` or `fp32`.
        batchnorm: How BatchNorm treats a batch in parts: `micro`, `running`, `frozen` or `exact` (see `BatchNormMode`).
        coupled: Whether the loss is computed of the outputs of the whole effective batch.
        accumulate_in: The dtype in which gradients of half-precision parameters are summed: `fp32` or `parameters`.
        savers: Ways to take less memory for the same gradient: `recompute` (all repeated blocks of the model run again
            in backward), `recompute=N` (N of them), `offload-activations`, `offload-gradients`, `offload-optimizer`. Or
            `auto`: a plan chooses the least costly that suffice.
        keeps: Tensors that the training loop keeps alive: `outputs`, `ema`, or both (see `Keep`).
        evaluation_batch: Samples per batch of the evaluation between updates, which becomes part of every trial.
        worst_of: Make batches of the longest of this many samples of the dataset, by its `collate`.
        multiple_of: Every micro-batch, and the target, is a multiple of this many samples.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.
        gpu: The card to simulate, instead of `device`: `rtx3090`, or a size such as `24GiB`.
        values: `cpu`: where the step reads values on a simulated card (`.item()`, a boolean mask, `nonzero`), they are
            computed on the CPU; None: a step that reads them is refused.
        memory: The budget: `10GiB`, `24GB`, or `80%` of the total; by default the free memory.
        reserve: The part of the budget to keep free.
        world_size: Ranks that share the target; the largest share decides.
        parallel: How they train one model (see `Parallel`); None: `fsdp2` if the workload has `parallelize`, else
            `ddp`.
        mesh: The ranks in one or two dimensions: (2, 8) are two replicas of a model sharded over 8 (HSDP); None: one
            dimension.
        equal: Only equal micro-batches.
        time_limit: Seconds that the search may take; for `verify`, the search for the causes of a difference.
        trial_limit: Seconds that one trial may take.

    Raises:
        UsageError: An option has a value that cannot be used.
    """

    optimizer: Any = None
    precision: str | None = None
    batchnorm: BatchNormMode | None = None
    coupled: bool | None = None
    accumulate_in: AccumulateIn | None = None
    savers: tuple[str, ...] | None = None
    keeps: tuple[Keep, ...] | None = None
    evaluation_batch: int | None = None
    worst_of: int | None = None
    multiple_of: int | None = None
    device: str = "auto"
    gpu: str | None = None
    values: Literal["cpu"] | None = None
    memory: MemorySize | None = None
    reserve: MemorySize | None = None
    world_size: int = 1
    parallel: Parallel | None = None
    mesh: tuple[int, ...] | None = None
    equal: bool = False
    time_limit: float | None = None
    trial_limit: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, "fp64"):
            check_word(self.precision, "precision", get_args(Precision))
        if self.batchnorm is not None:
            read_batchnorm_mode(self.batchnorm, UsageError)
        if self.coupled is not None:
            read_coupled(self.coupled)
        if self.accumulate_in is not None:
            read_accumulate_in(self.accumulate_in, UsageError)
        if self.savers is not None:
            chooses = self.savers in (AUTO, (AUTO,), [AUTO])
            object.__setattr__(self, "savers", (AUTO,) if chooses else read_savers(self.savers, UsageError))
        if self.keeps is not None:
            object.__setattr__(self, "keeps", read_keeps(self.keeps, UsageError))
        for name in ("evaluation_batch", "worst_of", "multiple_of", "world_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read_count(getattr(self, name), name))
        for name in ("time_limit", "trial_limit"):
            if getattr(self, name) is not None:
                read_seconds(getattr(self, name), f"the {name.replace('_', ' ')}")
        if self.parallel is not None:
            check_word(self.parallel, "parallel", get_args(Parallel))
        if self.values is not None:
            check_word(self.values, "values", ("cpu",))
        if self.mesh is not None:
            object.__setattr__(self, "mesh", _read_mesh(self.mesh, self.parallel))
            if len(self.mesh) > 1:  # HSDP.
                object.__setattr__(self, "parallel", "fsdp2")
        for name in ("memory", "reserve"):
            object.__setattr__(self, name, _read_size(getattr(self, name), name))
        check_flag(self.equal, "equal")
        self._check_device()

    @classmethod
    def of(cls, command: Command, given: Mapping[str, Any]) -> Options:
        """Return the options of a call of `autoaccum.<command>` with the keyword arguments `given`.

        Raises:
            TypeError: The command has no such argument.
            UsageError: As for `Options`.
        """
        for name in given:
            if name not in taken_by(command):
                raise TypeError(f"{command}() got an unexpected keyword argument {name!r}")
        if given.get("precision") is not None:
            words = ("fp64", "fp32") if command == "verify" else get_args(Precision)
            check_word(given["precision"], "precision", words)
        options = cls(**given)
        if options.chooses_savers and command not in _CHOOSING:
            raise UsageError(
                f"savers are {AUTO} (--savers {AUTO}), which a plan chooses, and {command} makes none with savers",
                hint=f"plan with --savers {AUTO}, and name those that it chose",
            )
        return options

    @property
    def chooses_savers(self) -> bool:
        """Whether a plan is to choose the savers."""
        return self.savers == (AUTO,)

    @property
    def overrides(self) -> dict[str, Any]:
        """Values that replace attributes of the workload, by name; None keeps the workload's own.

        Where savers are to be chosen, the workload has none until they are.
        """
        own = {name: getattr(self, name) for name in WORKLOAD_OPTIONS}
        return own | {"savers": ()} if self.chooses_savers else own

    def to_record(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as JSON values to be sent to another process.

        >>> Options(gpu="rtx3090", memory=parse_size("80%"), keeps=("ema",)).to_record()
        {'keeps': ['ema'], 'gpu': 'rtx3090', 'memory': '80%'}
        """
        record = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        plain: dict[str, Any] = {"keeps": list, "savers": list, "memory": str, "reserve": str, "mesh": mesh_word}
        return {
            name: plain.get(name, lambda same: same)(value)
            for name, (value, default) in record.items()
            if value != default
        }

    def _check_device(self) -> None:
        if self.gpu is None:
            return
        if not isinstance(self.gpu, str):
            raise UsageError(
                f"gpu is {self.gpu!r}",
                hint='give the name of a card or a size with its unit, such as "rtx3090" or "24GiB"',
            )
        if self.device != "auto":
            raise UsageError(
                f"both --device {self.device} and --gpu {self.gpu} are given",
                hint="choose one: --device measures on this machine, --gpu predicts for a card that need not be here",
            )


def taken_by(command: Command) -> set[str]:
    """Return the names of the options that a command takes."""
    return {field.name for field in dataclasses.fields(Options)} - _NOT_TAKEN[command]


def read_batchnorm_mode(mode: Any, error: type[AutoaccumError] = WorkloadError) -> BatchNormMode:
    """Return `mode` as a mode of BatchNorm; raise WorkloadError, or `error`, if there is no such mode."""
    check_word(mode, "batchnorm mode", BATCHNORM_MODES, error=error)
    return cast("BatchNormMode", mode)


def read_coupled(coupled: Any, error: type[AutoaccumError] = UsageError) -> bool:
    """Return `coupled`; raise `error` if it is neither True nor False."""
    if isinstance(coupled, bool):
        return coupled
    raise error(f"coupled is {coupled!r}", hint="take True or False")


def coupled_word(coupled: bool) -> str:
    """Return the value of `--coupled` that stands for `coupled`: `yes` or `no`."""
    return "yes" if coupled else "no"


def read_accumulate_in(word: Any, error: type[AutoaccumError] = WorkloadError) -> AccumulateIn:
    """Return `word` as a way to sum gradients; raise WorkloadError, or `error`, if there is no such way."""
    check_word(word, "accumulate_in", get_args(AccumulateIn), error=error)
    return cast("AccumulateIn", word)


def read_savers(savers: Any, error: type[AutoaccumError] = WorkloadError) -> tuple[str, ...]:
    """Return the words of `savers`, each once and in one order; `savers` may be one word or several.

    >>> read_savers(["offload-optimizer", "recompute=6"]), read_savers("recompute"), read_savers(None)
    (('recompute=6', 'offload-optimizer'), ('recompute',), ())

    Raises:
        WorkloadError: A word is unknown, or there is no number of blocks; or `error`, where that is given.
    """
    if not isinstance(savers, Iterable | None):
        raise error(f"savers is {savers!r}", hint="give a word, or several")
    given = [savers] if isinstance(savers, str) else list(savers or ())
    if AUTO in given:
        raise error(
            f"savers are {AUTO}, which stands alone and is for a plan to choose",
            hint=f"give --savers {AUTO} to autoaccum plan or fit, or name savers",
        )
    for word in given:
        if word not in (RECOMPUTE, *OFFLOADS) and not re.fullmatch(f"{RECOMPUTE}=[1-9][0-9]*", str(word)):
            raise error(
                f"{word!r} is no saver",
                hint=f"take {RECOMPUTE} (all repeated blocks), {RECOMPUTE}=N (N of them), {', '.join(OFFLOADS)}",
            )
    blocks = [word for word in given if word.startswith(RECOMPUTE)]
    return (*blocks[-1:], *(word for word in OFFLOADS if word in given))


def read_keeps(keeps: Any, error: type[AutoaccumError] = WorkloadError) -> tuple[Keep, ...]:
    """Return the words of `keeps`, each once and in the order of `KEEPS`; `keeps` may be one word or several.

    >>> read_keeps("ema"), read_keeps(["ema", "outputs", "ema"]), read_keeps(None)
    (('ema',), ('outputs', 'ema'), ())

    Raises:
        WorkloadError: A word is unknown; or `error`, where that is given.
    """
    if not isinstance(keeps, Iterable | None):
        raise error(f"keeps is {keeps!r}", hint=f"choose {' or '.join(KEEPS)}, or a tuple of both")
    given = [keeps] if isinstance(keeps, str) else list(keeps or ())
    for word in given:
        check_word(word, "keeps", KEEPS, error=error)
    return tuple(keep for keep in KEEPS if keep in given)


def mesh_word(mesh: Iterable[int]) -> str:
    """Return the value of `--mesh` that stands for `mesh`: `8` or `2x8`."""
    return "x".join(map(str, mesh))


def check_mesh(mesh: Sequence[int], ranks: int) -> None:
    """Raise UsageError unless the mesh has so many ranks."""
    if math.prod(mesh) != ranks:
        raise UsageError(
            f"the mesh {mesh_word(mesh)} has {math.prod(mesh)} ranks, and there are {ranks}",
            hint=f"give a mesh of {ranks}",
        )


def _read_mesh(given: Any, parallel: Parallel | None) -> tuple[int, ...]:
    """Return the dimensions of a mesh, which is written `2x8` or given as numbers.

    Raises:
        UsageError: They are no one or two numbers of at least 1, or two for replicated ranks.
    """
    is_numbers = isinstance(given, Sequence) and all(type(size) is int for size in given)
    text = given if isinstance(given, str) else mesh_word(given) if is_numbers else ""
    if not _MESH.fullmatch(text):
        raise UsageError(f"mesh is {given!r}", hint="write one or two numbers of ranks, such as 8 or 2x8")
    mesh = tuple(map(int, text.split("x")))
    if parallel == "ddp" and len(mesh) > 1:
        raise UsageError(
            f"the mesh {text} has two dimensions, and ddp replicates in one", hint="leave --mesh out, or take fsdp2"
        )
    return mesh


def _read_size(size: Any, name: str) -> MemorySize | None:
    if size is None or isinstance(size, MemorySize):
        return size
    if isinstance(size, str):
        return parse_size(size)
    raise UsageError(f"{name} is {size!r}", hint='write a size with its unit, such as "10GiB" or "80%"')
