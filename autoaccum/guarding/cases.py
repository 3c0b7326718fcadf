"""A guarded case: one workload or command on one card, its name, and the command that guards it."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from autoaccum.checks import read_count
from autoaccum.errors import UsageError
from autoaccum.options import Options, make_options, taken_by
from autoaccum.simulation.cards import find_card
from autoaccum.sources.command import CommandSource, check_target, read_command
from autoaccum.sources.source import NamedSource, find_source
from autoaccum.spec import NO_SAVERS

_COMMAND: Final = "-- "
"""Begins the `workload` of a case that is a command."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload or command on one card, with the requested options; the others are its own.

    A command may give only some of the fields: it then selects all known cases with these values.

    Attributes:
        workload: `model.py` or `model.py:name`, relative to the folder of the lock, with `/`; or a command as
            a shell reads it, after `-- `, which runs in that folder.
        target_batch: Samples per update, over all ranks; None: two micro-batches of `micro_batch`.
        micro_batch: The largest part, in samples; None: it is planned.
        options: How to run, and the simulated card.
    """

    workload: str = ""
    target_batch: int | None = None
    micro_batch: int | None = None
    options: Options = field(default_factory=Options)

    def command(self, folder: str | os.PathLike[str] = "") -> CommandSource | None:
        """Return the command as the source that runs in `folder`; None for a workload."""
        if not self.workload.startswith(_COMMAND):
            return None
        words = shlex.split(self.workload.removeprefix(_COMMAND))
        return CommandSource.of(words, folder, self.options.overrides)

    @property
    def takes_iter_size(self) -> bool:
        """False for a command whose updates are one micro-batch."""
        command = self.command()
        return command is None or command.takes_iter_size

    @property
    def has_size(self) -> bool:
        """True if a target batch or a micro-batch is given."""
        return self.target_batch is not None or self.micro_batch is not None

    @property
    def is_complete(self) -> bool:
        """True if everything is given that a measurement needs."""
        return bool(self.workload) and self.has_size and self.options.gpu is not None

    def to_record(self) -> dict[str, Any]:
        """Return the given values by the names of their fields: plain data for `make_case`."""
        options = self.options.to_record()
        given = {
            "workload": self.workload,
            "gpu": options.pop("gpu", None),
            "target_batch": self.target_batch,
            "micro_batch": self.micro_batch,
        }
        return {name: value for name, value in given.items() if value} | options

    def matches(self, other: Case) -> bool:
        """Return whether `other` has all the values that are given here."""
        others = other.to_record()
        return all(others.get(name) == value for name, value in self.to_record().items())


CASE_FIELDS = ("workload", "target_batch", "micro_batch", *(name for name in taken_by("guard") if name != "time_limit"))
"""The fields that a test may give."""


def make_case(
    *, workload: str = "", target_batch: int | None = None, micro_batch: int | None = None, **options: Any
) -> Case:
    """Make a case from its fields and its options; raise UsageError for an option that is not valid."""
    return Case(workload=workload, target_batch=target_batch, micro_batch=micro_batch, options=make_options(**options))


def read_reference(workload: str | os.PathLike[str] | Sequence[str] | None) -> str:
    """Return the `workload` of a case: of the name of a file, or of the words of a command.

    Raises:
        UsageError: The command has no place for the micro-batch.
    """
    if isinstance(workload, list | tuple):
        return _COMMAND + CommandSource.of(workload).name
    return "" if workload is None else os.fspath(workload)  # type: ignore[arg-type]


def case_name(case: Case) -> str:
    """Return the name of a case: what `autoaccum guard` takes to select it. Different cases have different names.

    >>> case_name(make_case(workload="train.py", gpu="rtx3090", target_batch=256, precision="bf16"))
    'train.py --gpu rtx3090 --target-batch 256 --precision bf16'
    >>> case_name(make_case(workload="-- python train.py --bs={micro_batch}", gpu="rtx3090", micro_batch=8))
    '--gpu rtx3090 --micro-batch 8 -- python train.py --bs={micro_batch}'
    """
    return _join(case.to_record())


def _join(given: dict[str, Any], *further: str) -> str:
    """Return the arguments of `autoaccum guard` for the given values, the workload first, or a command last."""
    workload, flags = given.get("workload", ""), (*_flags(given), *further)
    return f"{shlex.join(flags)} {workload}" if workload.startswith(_COMMAND) else shlex.join((workload, *flags))


def _flags(given: dict[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "overrides":
            yield from (word for pair in value.items() for word in ("--set", "=".join(map(str, pair))))
        elif isinstance(value, list):
            yield from (word for item in value or [NO_SAVERS] for word in (flag, item))
        elif isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        elif name != "workload":
            yield from (flag, str(value))


def check_case(case: Case) -> Case:
    """Check the given values, and return the case with the name that its card has in cases, so that equal ones are.

    Raises:
        UsageError: A value is not valid.
    """
    workload, optimizer = case.workload, case.options.spec.get("optimizer")
    if not isinstance(workload, str) or (workload and not workload.strip()) or workload.startswith(":"):
        raise UsageError(f"the workload is {workload!r}", hint="write model.py or model.py:name")
    if not workload.isprintable():  # Nor are bytes that are not UTF-8.
        raise UsageError(f"the name {workload!r} cannot be written in a lock", hint="rename the file")
    if not isinstance(optimizer, str | None):
        raise UsageError(f"the optimizer is {optimizer!r}", hint="give a name of torch.optim, such as AdamW")
    for name in ("target_batch", "micro_batch"):
        if getattr(case, name) is not None:
            read_count(getattr(case, name), name.replace("_", "-"))
    share = None if case.target_batch is None else -(-case.target_batch // case.options.world_size)
    if case.micro_batch is not None and share is not None and case.micro_batch > share:
        raise UsageError(
            f"the micro-batch {case.micro_batch} is more than a rank's share of the target batch, {share}",
            hint="give a smaller one, or none to have it planned",
        )
    command = case.command()
    read_command(command, case.options, verb="guard")
    if case.target_batch is not None:
        check_target(command, case.target_batch)
    if case.options.gpu is None:
        return case
    gpu = "".join(find_card(case.options.gpu).name.split())
    return dataclasses.replace(case, options=dataclasses.replace(case.options, gpu=gpu))


def check_complete(case: Case) -> None:
    """Raise UsageError if a value is missing that a measurement needs."""
    if case.options.gpu is None:
        raise UsageError(
            f"no card is given to guard {case.workload} on", hint="name one to simulate (see `autoaccum gpus`): rtx3090"
        )
    if not case.is_complete:
        size = "target batch" if case.takes_iter_size else "micro-batch"
        raise UsageError(f"{case.workload} has no {size}", hint="say how many samples make an update")


def guard_command(case: Case, folder: Path, *further: str) -> str:
    """Return the command that guards just this case, from the current folder; missing values become placeholders.

    The workload is relative to `folder`; `further` flags come after the others.
    """
    size = "target_batch" if case.takes_iter_size else "micro_batch"
    given = {"workload": "model.py", "gpu": "NAME"} | ({} if case.has_size else {size: "N"})
    given |= case.to_record()
    source = find_source(given["workload"])
    is_file = case.workload and not isinstance(source, NamedSource)
    if is_file and os.access(folder / source.file, os.F_OK):  # Nor can a name be too long for that.
        given["workload"] = source.at(Path(os.path.relpath(folder / source.file)).as_posix()).name
    return f"autoaccum guard {_join(given, *further)}"
