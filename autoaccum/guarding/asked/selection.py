"""Which cases a call is about: those that are named, those that are locked, or the one that is asked for."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.guarding.asked.cases import case_name, check_case
from autoaccum.guarding.asked.project import Project
from autoaccum.guarding.records import Case
from autoaccum.workload.references import split_reference

_SIZES = ("target_batch", "micro_batch")
_FURTHER = ("precision", "optimizer", "memory", "reserve", "keeps", "evaluation_batch", "worst_of", "batchnorm")
_FLAGS = ("gpu", "device", *_SIZES, *_FURTHER, "world_size")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was asked for; what is None or empty was not.

    Attributes:
        workload: As it was written: a file is relative to the current folder.
        gpus: Cards to simulate.
        device: In place of them, `cpu`, `cuda` or `cuda:N`.
        target_batch, micro_batch, precision, optimizer, memory, reserve, world_size, equal, keeps, evaluation_batch,
            worst_of, batchnorm: As in `Case`.
    """

    workload: str | None = None
    gpus: tuple[str, ...] = ()
    device: str | None = None
    target_batch: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    memory: str | None = None
    reserve: str | None = None
    world_size: int | None = None
    equal: bool = False
    keeps: tuple[str, ...] | None = None
    evaluation_batch: int | None = None
    worst_of: int | None = None
    batchnorm: str | None = None

    @property
    def sizes(self) -> bool:
        """Whether it says how much is trained at once, and so makes cases of its own."""
        return self.target_batch is not None or self.micro_batch is not None

    @property
    def is_whole(self) -> bool:
        """Whether it says all of its cases, whatever else is known."""
        return self.workload is not None and self.sizes and bool(self.gpus or self.device is not None)

    def agrees(self, case: Case) -> bool:
        """Whether a case of its workload is as asked."""
        asked = {name: getattr(self, name) for name in ("device", *_SIZES, "world_size", *_FURTHER)}
        return (
            all(value is None or getattr(case, name) == value for name, value in asked.items())
            and (not self.gpus or case.gpu in self.gpus)
            and (case.equal or not self.equal)
        )


def select_cases(
    selection: Selection, project: Project, known: Iterable[Case], gone: Iterable[Case] = ()
) -> tuple[Case, ...]:
    """The cases that are asked for, ordered by name.

    Args:
        selection: What is asked for, from the current folder.
        project: What cases are relative to.
        known: The cases that are named or locked.
        gone: Those of them whose file is there no more.

    Raises:
        UsageError: Something cannot be asked for so, or a size is without a workload, or without a card or device.
        NotMeasuredError: There are cases on some of the cards that are asked for, and none on another.
    """
    cases = _select(selection, project, known, gone)
    cards = {
        case.gpu: name for name in selection.gpus for case in _as_cases(dataclasses.replace(selection, gpus=(name,)))
    }
    missing = [name for gpu, name in cards.items() if gpu not in {case.gpu for case in cases}]
    if cases and missing:
        alone = dataclasses.replace(selection, gpus=tuple(missing))
        raise NotMeasuredError(
            f"nothing on {' or '.join(missing)} that is locked or named in pyproject.toml is as asked",
            hint=f"lock it by `{asked_words(alone, *project.options, '--update')}`",
        )
    return cases


def _select(selection: Selection, project: Project, known: Iterable[Case], gone: Iterable[Case]) -> tuple[Case, ...]:
    written = _as_cases(selection)
    selection = _as_written(selection, written)
    if selection.workload is None:
        if selection.sizes:
            raise UsageError("a batch is given without a workload", hint="name it: autoaccum guard model.py ...")
        return _ordered(case for case in known if selection.agrees(case))
    reference = project.reference(selection.workload, Path.cwd())
    alike = [case for case in known if case.workload == reference and selection.agrees(case)]
    if selection.is_whole:
        return _ordered(check_case(dataclasses.replace(case, workload=reference)) for case in written)
    if selection.sizes and not alike:
        raise UsageError(
            f"{reference} is to be guarded, and no card is named",
            hint="add --gpu NAME (see `autoaccum gpus`), or --device cpu to measure here",
        )
    moved = [case for case in gone if selection.agrees(case)]
    return _ordered(alike or _moved(reference, project.folder, moved))


def _as_cases(selection: Selection) -> list[Case]:
    """What a selection says, as cases of some workload on each card, each thing written in one way.

    Raises:
        UsageError: It cannot be asked for so.
    """
    said = {name: getattr(selection, name) for name in (*_SIZES, *_FURTHER)}
    said |= {} if selection.sizes else {"target_batch": 1}
    said |= {"world_size": selection.world_size or 1, "equal": selection.equal, "workload": "any"}
    device = "cpu" if selection.device is None and not selection.gpus else selection.device
    return [check_case(Case(gpu=gpu, device=device, **said)) for gpu in dict.fromkeys(selection.gpus) or (None,)]


def _as_written(selection: Selection, written: Sequence[Case]) -> Selection:
    gpus = tuple(case.gpu for case in written if case.gpu is not None)
    return dataclasses.replace(selection, gpus=gpus, **{name: getattr(written[0], name) for name in _FURTHER})


def is_gone(case: Case, folder: Path) -> bool:
    """Whether its workload is a file that is not there; of a module nothing is known."""
    target, _, _ = split_reference(case.workload)
    return target.endswith(".py") and not (folder / target).exists()


def find_moved(case: Case, gone: Iterable[Case]) -> Case | None:
    """The one case that differs in nothing but its file, which is there no more; None where there is none, or more."""
    found = [other for other in gone if dataclasses.replace(other, workload=case.workload) == case]
    return found[0] if len(found) == 1 else None


def guard_words(case: Case, folder: Path, *further: str) -> str:
    """The command that guards just this case, from the current folder."""
    said = {**vars(case), "workload": _from_here(case.workload, folder)}
    return _command({**said, "world_size": case.world_size if case.world_size > 1 else None}, further)


def asked_words(selection: Selection, *further: str) -> str:
    """The command that guards what is asked for, with what it leaves out as words to be replaced."""
    said = {**vars(selection), "workload": selection.workload or "model.py", "gpu": selection.gpus or None}
    if not selection.gpus and selection.device is None:
        said["gpu"] = "NAME"
    if not selection.sizes:
        said["target_batch"] = "N"
    return _command(said, further)


def _command(said: Mapping[str, Any], further: Sequence[str]) -> str:
    words = ["autoaccum", "guard", said["workload"]]
    for name in _FLAGS:
        value = said[name]
        for one in value if isinstance(value, tuple) else [value]:
            words += [] if one is None else [f"--{name.replace('_', '-')}", str(one)]
    return shlex.join([*words, *(["--equal"] if said["equal"] else []), *further])


def _ordered(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(dict.fromkeys(cases), key=case_name))


def _moved(reference: str, folder: Path, gone: list[Case]) -> list[Case]:
    """The cases of the one file that is there no more, as cases of a file that is."""
    there = not is_gone(Case(workload=reference), folder)
    if not there or len({case.workload for case in gone}) != 1:
        return []
    return [dataclasses.replace(case, workload=reference) for case in gone]


def _from_here(workload: str, folder: Path) -> str:
    target, colon, name = split_reference(workload)
    if not (folder / target).exists():
        return workload
    return f"{Path(os.path.relpath(folder / target)).as_posix()}{colon}{name}"
