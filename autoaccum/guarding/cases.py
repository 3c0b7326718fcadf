"""What is guarded: one workload on one card or device, what it is called, and the command that guards it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoaccum.checks import read_count
from autoaccum.devices.simulated.cards import find_card
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.workload.module_names import split_reference

_PLAIN = re.compile(r"[\w./:+%-]+", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one card or device, as it was asked for; what was not asked for is the workload's own.

    A command may name a part of it: all known cases that have that part are meant then.

    Attributes:
        workload: `model.py`, `model.py:name`, relative to the folder of the lock, with `/`; or `package.module:name`.
        target_batch: Samples per update, over all ranks; None: two micro-batches of `micro_batch`.
        micro_batch: The largest part, in samples, where it is not to be planned.
        options: How it is to run, and where: on a card that is simulated, or on a device of its own.
    """

    workload: str = ""
    target_batch: int | None = None
    micro_batch: int | None = None
    options: Options = field(default_factory=Options)

    @property
    def place(self) -> str | None:
        """The card that is simulated, or the device that measures; None where it says neither."""
        return self.options.gpu or (None if self.options.device == "auto" else self.options.device)

    @property
    def has_size(self) -> bool:
        """Whether it says how much is trained at once."""
        return self.target_batch is not None or self.micro_batch is not None

    @property
    def is_whole(self) -> bool:
        """Whether it says all that a measurement needs."""
        return bool(self.workload) and self.has_size and self.place is not None

    def asked(self) -> dict[str, Any]:
        """What it says, by names of fields: plain data for `make_case`."""
        options = self.options.to_record()
        place: dict[str, Any] = {name: options.pop(name) for name in ("gpu", "device") if name in options}
        said = {
            "workload": self.workload,
            **place,
            "target_batch": self.target_batch,
            "micro_batch": self.micro_batch,
        }
        return {name: value for name, value in said.items() if value} | options

    def matches(self, other: Case) -> bool:
        """Whether all that it says is said by `other`, too."""
        others = other.asked()
        return all(others.get(name) == value for name, value in self.asked().items())


_NO_OPTIONS = ("accumulate_in", "multiple_of", "time_limit", "trial_limit")
_CASE_FIELDS = [field.name for field in (*dataclasses.fields(Case)[:-1], *dataclasses.fields(Options))]
CASE_FIELDS = tuple(name for name in _CASE_FIELDS if name not in _NO_OPTIONS)
"""By which a project, or a test, asks for a case."""


def make_case(
    *, workload: str = "", target_batch: int | None = None, micro_batch: int | None = None, **options: Any
) -> Case:
    """A case from fields of it and of its options.

    Raises:
        UsageError: An option cannot be honoured.
    """
    return Case(
        workload=workload,
        target_batch=target_batch,
        micro_batch=micro_batch,
        options=Options(**options),
    )


def case_name(case: Case) -> str:
    """The name of a case; no two are called alike.

    >>> case_name(make_case(workload="train.py", gpu="rtx3090", target_batch=256, precision="bf16"))
    'train.py on rtx3090, target 256, bf16'
    """
    options = case.options
    told = [
        ("target {}", case.target_batch),
        ("micro-batch {}", case.micro_batch),
        ("{}", options.precision),
        ("optimizer {}", options.optimizer),
        ("memory {}", options.memory),
        ("reserve {}", options.reserve),
        ("{} ranks", None if options.world_size == 1 else options.world_size),
        ("{}", "equal parts" if options.equal else None),
        ("keeps {}", None if options.keeps is None else "+".join(options.keeps) or "nothing"),
        ("evaluation batch {}", options.evaluation_batch),
        ("worst of {}", options.worst_of),
        ("batchnorm {}", options.batchnorm),
    ]
    workload = case.workload if _PLAIN.fullmatch(case.workload) else json.dumps(case.workload, ensure_ascii=False)
    return ", ".join(
        [f"{workload} on {case.place}", *(form.format(value) for form, value in told if value is not None)]
    )


def check_case(case: Case, *, partial: bool = False) -> Case:
    """The case with its card written in one way, so that equal cases compare equal.

    One that is `partial` may leave out what a measurement needs.

    Raises:
        UsageError: It cannot be asked for so.
    """
    options = case.options
    if not partial or case.workload:
        _check_workload(case.workload)
    if options.device != "auto" and not _DEVICE.fullmatch(str(options.device)):
        raise UsageError(f"the device is {options.device!r}", hint="take cpu, cuda or cuda:N")
    if not isinstance(options.optimizer, str | None):
        raise UsageError(f"the optimizer is {options.optimizer!r}", hint="give a name of torch.optim, such as AdamW")
    for name in ("target_batch", "micro_batch"):
        if getattr(case, name) is not None:
            read_count(getattr(case, name), name.replace("_", "-"))
    if not partial and case.place is None:
        raise UsageError(
            "neither a card nor a device is given",
            hint="name a card to simulate, such as rtx3090, or the device cpu or cuda to measure on",
        )
    if not partial and not case.has_size:
        raise UsageError(f"{case.workload} has no target batch", hint="say how many samples make an update")
    share = case.micro_batch if case.target_batch is None else -(-case.target_batch // options.world_size)
    if case.micro_batch is not None and share is not None and case.micro_batch > share:
        raise UsageError(
            f"the micro-batch {case.micro_batch} is more than a rank's share of the target batch, {share}",
            hint="take a smaller one, or leave it out to have it planned",
        )
    if options.gpu is None:
        return case
    gpu = "".join(find_card(options.gpu).name.split())
    return dataclasses.replace(case, options=dataclasses.replace(options, gpu=gpu))


def guard_command(case: Case, folder: Path, *further: str) -> str:
    """The command that guards just this case, from the current folder; words to replace stand for what it leaves out.

    The workload is relative to `folder`; `further` flags come at the end.
    """
    said = {**case.asked(), "workload": _from_here(case.workload, folder) if case.workload else "model.py"}
    if case.place is None:
        said["gpu"] = "NAME"
    if not case.has_size:
        said["target_batch"] = "N"
    words = ["autoaccum", "guard", said.pop("workload")]
    for name, value in said.items():
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(each)])]
    return shlex.join([*words, *further])


def _from_here(workload: str, folder: Path) -> str:
    target, colon, name = split_reference(workload)
    if not (folder / target).exists():
        return workload
    return f"{Path(os.path.relpath(folder / target)).as_posix()}{colon}{name}"


def _check_workload(workload: Any) -> None:
    if not isinstance(workload, str) or not workload.strip() or workload.startswith(":"):
        hint = "write model.py, model.py:name or package.module:name"
        raise UsageError(f"the workload is {workload!r}", hint=hint)
    if not workload.isprintable():  # Nor are bytes that are not UTF-8.
        raise UsageError(f"the name {workload!r} cannot be written in a lock", hint="rename the file")
