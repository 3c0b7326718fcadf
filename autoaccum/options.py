"""The options that the commands have in common: one frozen record, checked once, and part of every request."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, get_args

from autoaccum.checks import check_flag, check_word, read_count, read_seconds
from autoaccum.errors import UsageError
from autoaccum.spec import AUTO, SPEC_FIELDS, Precision, SpecArguments, TrainingSpec, read_spec
from autoaccum.units import MemorySize, parse_size

Parallel = Literal["ddp", "fsdp2"]
"""How several ranks train one model: `ddp`, each holds all of it, or `fsdp2`, each holds a shard."""

GradSync = Literal["each", "last"]
"""When FSDP2 sums the gradients of an update over ranks: with each micro-batch, or with the last."""

CHECKS: Final = ("warn", "strict", "off")
"""What training does if `weight` is not what the loss divides by: warn, raise an error, or not even check."""

_MESH = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)?", re.ASCII)

Command = Literal["plan", "compare", "fit", "verify", "tune", "guard", "explain"]

_CHOOSING: Final = ("plan", "compare", "fit")
"""Commands that choose savers."""
_SEARCHING: Final = frozenset({"world_size", "equal", "gpu", "values", "time_limit", "trial_limit", "updates"})
_SHARDING: Final = frozenset({"parallel", "mesh"})
_NOT_TAKEN: Final[Mapping[Command, frozenset[str]]] = {
    "plan": frozenset(),
    "compare": frozenset({"device", "time_limit"}),
    "fit": _SEARCHING,
    "verify": (_SEARCHING - {"world_size", "time_limit"})
    | _SHARDING
    | {"memory", "reserve", "accumulate_in", "ema", "hold_outputs", "evaluation_batch", "optimizer"},
    "tune": _SHARDING
    | {"world_size", "equal", "gpu", "values", "accumulate_in", "ema", "hold_outputs", "updates"}
    | {"evaluation_batch", "longest_of", "trial_limit"},
    "guard": frozenset({"device", "trial_limit", "accumulate_in", "multiple_of"}),
    "explain": _SHARDING
    | {"device", "memory", "reserve", "world_size", "equal", "time_limit", "trial_limit", "evaluation_batch"}
    | {"multiple_of", "updates"},
}


class OptionArguments(SpecArguments, total=False):
    """The fields of `Options` as keyword arguments, with those of its partial spec."""

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
    updates: int
    overrides: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a command is told of how to run: a partial `TrainingSpec`, and the machine with its limits.

    Attributes:
        spec: The values that replace those of the workload; values that are not given are left out.
        chooses_savers: Whether a plan is to choose the savers (`savers="auto"`); until then there are none.
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
        updates: The updates after which a run of a command ends. The first one makes the optimizer's state; the next
            ones find it, and the memory that the first one left cached.

        overrides: Values in place of constants at the top level of a workload file, or of the parameters of a model by
            name; in a command, of `{name}`. They are numbers, strings, booleans, None, or lists of those.

    Raises:
        UsageError: An option has a value that cannot be used.
    """

    spec: SpecArguments = field(default_factory=SpecArguments, hash=False)
    chooses_savers: bool = False
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
    updates: int = 3
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", read_spec(self.spec, precisions=(*get_args(Precision), "fp64")))
        object.__setattr__(self, "world_size", read_count(self.world_size, "world_size"))
        object.__setattr__(self, "updates", read_count(self.updates, "updates", least=2))
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
        object.__setattr__(self, "overrides", read_overrides(self.overrides))
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
        options = make_options(**given)
        if options.chooses_savers and command not in _CHOOSING:
            raise UsageError(
                f"savers are {AUTO} (--savers {AUTO}), which a plan chooses, and {command} makes none with savers",
                hint=f"plan with --savers {AUTO}, and name those that it chose",
            )
        return options

    def with_spec(self, **changes: Any) -> Options:
        """Return the options with some values of the spec in place of theirs; None takes one away."""
        return dataclasses.replace(self, spec=cast("SpecArguments", {**self.spec, **changes}))

    def to_record(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as JSON values for `make_options`.

        >>> make_options(gpu="rtx3090", memory=parse_size("80%"), ema=True).to_record()
        {'ema': True, 'gpu': 'rtx3090', 'memory': '80%'}
        """
        defaults = Options()
        machine = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[2:]}
        given = {**self.spec, **{name: value for name, value in machine.items() if value != getattr(defaults, name)}}
        if self.chooses_savers:
            given["savers"] = (AUTO,)
        plain: dict[str, Any] = {"savers": list, "memory": str, "reserve": str, "mesh": mesh_word, "overrides": dict}
        return {name: plain.get(name, lambda same: same)(value) for name, value in given.items()}

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


def resolve_spec(*specs: Mapping[str, Any] | TrainingSpec | None) -> TrainingSpec:
    """Return the complete spec of partial ones, the strongest first: as given, of a plan, of the workload.

    A value of None is not given; an empty tuple is: `savers=()` takes away those of a plan.

    >>> resolve_spec({"savers": (), "precision": None}, TrainingSpec(savers=("recompute",), precision="bf16"))
    TrainingSpec(optimizer=None, precision='bf16', batchnorm='micro', coupled=False, accumulate_in='fp32', savers=(), \
ema=False, hold_outputs=False, evaluation_batch=None, longest_of=None, multiple_of=None)

    Raises:
        UsageError: A value cannot be used.
    """
    merged: dict[str, Any] = {}
    for spec in reversed(specs):
        given = spec.arguments() if isinstance(spec, TrainingSpec) else spec or {}
        merged |= {name: value for name, value in given.items() if value is not None}
    return TrainingSpec(**merged)


def taken_by(command: Command) -> tuple[str, ...]:
    """Return the names of the options that a command takes, in the order of the records."""
    names = (*SPEC_FIELDS, *(field.name for field in dataclasses.fields(Options)[2:]))
    return tuple(name for name in names if name not in _NOT_TAKEN[command])


def make_options(**given: Any) -> Options:
    """Return `Options` of keyword arguments, of the spec and of the machine alike; raises as `Options`."""
    spec = {name: given.pop(name) for name in SPEC_FIELDS if name in given}
    chooses = spec.get("savers") in (AUTO, (AUTO,), [AUTO])
    if chooses:
        spec["savers"] = ()
    return Options(spec=cast("SpecArguments", spec), chooses_savers=chooses, **given)


def read_overrides(given: Any) -> dict[str, Any]:
    """Return the values that are set by name; raise UsageError unless they are those of a mapping that JSON has."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise UsageError(f"overrides are {given!r}", hint='give names and values, such as {"length": 1024}')
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not all(
            isinstance(item, str | int | None) or (type(item) is float and math.isfinite(item)) for item in values
        ):
            raise UsageError(
                f"{name} is set to {value!r}", hint="give a number, a text, True, False, None, or a list of such values"
            )
    return dict(given)


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
