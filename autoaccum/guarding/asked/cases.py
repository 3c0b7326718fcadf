"""What a case is called, and what it may ask for."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from autoaccum.devices.simulated.catalog import find_card
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.guarding.records import Case
from autoaccum.options import Precision
from autoaccum.units import parse_size
from autoaccum.workload.companions import read_count, read_keeps
from autoaccum.workload.modes import read_mode

_PLAIN = re.compile(r"[\w./:+%-]+", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)
_COUNTS = ("target_batch", "micro_batch", "world_size", "evaluation_batch", "worst_of")
_CASE_WAY_OUT = "name a card to simulate, such as rtx3090, or the device cpu or cuda to measure on"


def case_name(case: Case) -> str:
    """What a case is called, such as `train.py on rtx3090, target 256, bf16`: no two are called alike.

    >>> case_name(Case(workload="train.py", gpu="rtx3090", target_batch=256, precision="bf16"))
    'train.py on rtx3090, target 256, bf16'
    """
    told = [
        ("target {}", case.target_batch),
        ("micro-batch {}", case.micro_batch),
        ("{}", case.precision),
        ("optimizer {}", _plain(case.optimizer)),
        ("memory {}", _plain(case.memory)),
        ("reserve {}", _plain(case.reserve)),
        ("{} ranks", None if case.world_size == 1 else case.world_size),
        ("{}", "equal parts" if case.equal else None),
        ("keeps {}", None if case.keeps is None else "+".join(case.keeps) or "nothing"),
        ("evaluation batch {}", case.evaluation_batch),
        ("worst of {}", case.worst_of),
        ("batchnorm {}", case.batchnorm),
    ]
    where = _plain(case.device if case.gpu is None else case.gpu)
    return ", ".join(
        [f"{_plain(case.workload)} on {where}", *(form.format(value) for form, value in told if value is not None)]
    )


def expand_cases(
    *,
    workload: str,
    gpu: str | Sequence[str] | None = None,
    device: str | None = None,
    precision: str | Sequence[str] | None = None,
    **asked: Any,
) -> tuple[Case, ...]:
    """The cases of one workload: one for each card and precision, in the order of these.

    Args:
        workload: As in `Case`.
        gpu: Cards, by any of their names.
        device: In place of them, `cpu`, `cuda` or `cuda:N`.
        precision: One or several; None: the workload's own.
        asked: The other fields of `Case`.

    Raises:
        UsageError: It cannot be asked for so.
    """
    _check_place(gpu, device)
    gpus = [None] if gpu is None else [_card(name) for name in _listed(gpu, "gpu")]
    precisions = [None] if precision is None else [_precision(name) for name in _listed(precision, "precision")]
    cases = [
        check_case(Case(workload=workload, gpu=gpu, device=device, precision=precision, **asked))
        for gpu in gpus
        for precision in precisions
    ]
    for at, case in enumerate(cases):
        if case in cases[:at]:
            raise UsageError(f"{case_name(case)} is named twice", hint="name each card and precision once")
    return tuple(cases)


def check_case(case: Case) -> Case:
    """A case with each thing written in one way, so that what means the same is the same case.

    Raises:
        UsageError: It cannot be asked for so.
    """
    if not isinstance(case.workload, str) or not case.workload.strip():
        raise UsageError(
            f"the workload is {case.workload!r}", hint="write model.py, model.py:name or package.module:name"
        )
    if not _is_text(case.workload):
        raise UsageError(f"the name {case.workload!r} is not UTF-8, and a lock is", hint="rename the file")
    if not case.workload.isprintable() or case.workload.startswith(":"):
        hint = "name a file or a module in front of the colon" if case.workload[0] == ":" else "rename the file"
        raise UsageError(f"the workload is {case.workload!r}", hint=hint)
    _check_place(case.gpu, case.device)
    for name in _COUNTS:
        _as_asked(read_count, getattr(case, name), name.replace("_", "-"))
    if case.target_batch is None and case.micro_batch is None:
        raise UsageError(f"{case.workload} has no target batch", hint="say how many samples make an update")
    share = -(-case.target_batch // case.world_size) if case.target_batch is not None else case.micro_batch
    if case.micro_batch is not None and share is not None and case.micro_batch > share:
        raise UsageError(
            f"the micro-batch {case.micro_batch} is more than a rank's share of the target batch, {share}",
            hint="take a smaller one, or leave it out to have it planned",
        )
    if not isinstance(case.equal, bool):
        raise UsageError(f"equal is {case.equal!r}", hint="write true or false")
    if case.optimizer is not None and (not isinstance(case.optimizer, str) or not case.optimizer.isidentifier()):
        raise UsageError(f"the optimizer is {case.optimizer!r}", hint="give a name of torch.optim, such as AdamW")
    return dataclasses.replace(
        case,
        gpu=None if case.gpu is None else _card(case.gpu),
        precision=None if case.precision is None else _precision(case.precision),
        memory=_size(case.memory, "memory"),
        reserve=_size(case.reserve, "reserve"),
        keeps=None if case.keeps is None else _as_asked(read_keeps, case.keeps),
        batchnorm=None if case.batchnorm is None else _as_asked(read_mode, case.batchnorm),
    )


def _check_place(gpu: Any, device: Any) -> None:
    if gpu is not None and device is not None:
        first = gpu if isinstance(gpu, str) else ", ".join(map(str, gpu))
        raise UsageError(
            f"both --device {device} and --gpu {first} are given",
            hint="--device measures on what is here, --gpu predicts for a card that need not be: take one",
        )
    if gpu is None and device is None:
        raise UsageError("neither a card nor a device is given", hint=_CASE_WAY_OUT)
    if device is not None and (not isinstance(device, str) or not _DEVICE.fullmatch(device)):
        same = ", which is not the same everywhere" if device == "auto" else ""
        raise UsageError(f"the device is {device!r}{same}", hint="take cpu, cuda or cuda:N")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(given: Any, what: str) -> list[Any]:
    """One or several, as a list that is not empty."""
    several = [given] if isinstance(given, str) else given
    if not isinstance(several, (list, tuple)) or not all(isinstance(each, str) for each in several):
        raise UsageError(f"{what} is {given!r}", hint="give a name, or a list of names")
    if not several:
        raise UsageError(f"{what} is an empty list", hint="name one, or leave it out")
    return list(several)


def _card(name: Any) -> str:
    if not isinstance(name, str):
        raise UsageError(f"gpu is {name!r}", hint=_CASE_WAY_OUT)
    return "".join(find_card(name).name.split())


def _precision(name: Any) -> str:
    known = get_args(Precision)
    if name not in known:
        raise UsageError(f"there is no precision {name!r}", hint=f"take {', '.join(known)}")
    return str(name)


def _size(size: Any, what: str) -> str | None:
    if size is None:
        return None
    if not isinstance(size, str):
        raise UsageError(f"{what} is {size!r}", hint='write its unit too, such as "10GiB" or "80%"')
    parse_size(size)
    return "".join(size.split())


def _as_asked(read: Callable[..., Any], *given: Any) -> Any:
    """What `read` makes of it; what it refuses was asked for, and is no fault of the workload."""
    try:
        return read(*given)
    except WorkloadError as error:
        raise UsageError(error.message, hint=error.hint) from None


def _plain(text: str | None) -> str | None:
    """Text that cannot be mistaken for what follows it."""
    return text if text is None or _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
