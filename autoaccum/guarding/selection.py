"""Which cases a call is about: those that are named, those that are locked, or the one that is asked for."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.guarding.cases import case_name
from autoaccum.guarding.records import Case

_BESIDE_SIZES = ("precision", "optimizer", "memory", "reserve", "keeps", "evaluation_batch", "worst_of", "batchnorm")
_FLAGS = ("gpu", "device", "target_batch", "micro_batch", *_BESIDE_SIZES)


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

    def agrees(self, case: Case) -> bool:
        """Whether a case of its workload is as asked."""
        names = ("device", "target_batch", "micro_batch", "world_size", *_BESIDE_SIZES)
        asked = {name: getattr(self, name) for name in names}
        return (
            all(value is None or getattr(case, name) == value for name, value in asked.items())
            and (not self.gpus or case.gpu in self.gpus)
            and (case.equal or not self.equal)
        )


def select_cases(selection: Selection, folder: Path, known: Iterable[Case], gone: Iterable[Case]) -> tuple[Case, ...]:
    """The cases that are asked for, ordered by name.

    Args:
        selection: What is asked for.
        folder: What references in cases are relative to.
        known: The cases that are named or locked.
        gone: Those of them whose file is there no more.

    Raises:
        UsageError: A size is asked for without a workload, or without a card or device.
    """
    if selection.workload is None:
        if selection.sizes:
            raise UsageError("a batch is given without a workload", hint="name it: autoaccum guard model.py ...")
        return _ordered(case for case in known if selection.agrees(case))
    reference = reference_within(selection.workload, folder)
    alike = [case for case in known if case.workload == reference and selection.agrees(case)]
    if selection.sizes:
        return _ordered(_asked(selection, reference, alike))
    return _ordered(alike or _moved(reference, folder, [case for case in gone if selection.agrees(case)]))


def reference_within(workload: str, folder: Path) -> str:
    """A reference that is relative to the current folder, as one that is relative to `folder`; a module as it is."""
    target, colon, name = split_reference(workload)
    path = Path(target).expanduser()
    if not (path.exists() or target.endswith(".py") or "/" in target):
        return workload
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return f"{Path(relative).as_posix()}{colon}{name}"


def split_reference(workload: str) -> tuple[str, str, str]:
    """The file or module of a reference, its colon if it has one, and the name after that."""
    target, colon, name = workload.rpartition(":")
    return (target, colon, name) if colon and re.fullmatch(r"\w*", name) else (workload, "", "")


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
    words = ["autoaccum", "guard", _from_here(case.workload, folder)]
    for name in _FLAGS:
        value = getattr(case, name)
        for one in value if isinstance(value, tuple) else [value]:
            words += [] if one is None else [f"--{name.replace('_', '-')}", str(one)]
    words += ["--world-size", str(case.world_size)] if case.world_size > 1 else []
    words += ["--equal"] if case.equal else []
    return shlex.join([*words, *further])


def _ordered(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(dict.fromkeys(cases), key=case_name))


def _asked(selection: Selection, reference: str, alike: list[Case]) -> Iterator[Case]:
    """The very cases of a selection that says the size; where it says no card, on those that are known for it."""
    given: dict[str, Any] = {name: getattr(selection, name) for name in ("target_batch", "micro_batch", *_BESIDE_SIZES)}
    given |= {"workload": reference, "equal": selection.equal, "world_size": selection.world_size or 1}
    if selection.gpus and selection.device is not None:
        raise UsageError(
            f"both --device {selection.device} and --gpu {selection.gpus[0]} are given",
            hint="--device measures on what is here, --gpu simulates a card that need not be: take one",
        )
    if selection.device is not None:
        yield Case(device=selection.device, **given)
    elif selection.gpus:
        yield from (Case(gpu=gpu, **given) for gpu in selection.gpus)
    elif alike:
        yield from alike
    else:
        raise UsageError(
            f"{reference} is to be guarded, and no card is named",
            hint="add --gpu NAME (see `autoaccum gpus`), or --device cpu to measure here",
        )


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
