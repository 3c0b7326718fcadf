"""What is to be planned, as it was given: a file, a Workload, or live objects; and the device its trials run on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.checkout import Checkout
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.device_choice import check_device, make_device, simulate_device
from autoaccum.planning.request import check_seconds
from autoaccum.units import MemorySize, parse_size
from autoaccum.workload.companions import read_count, read_keeps
from autoaccum.workload.modes import read_accumulate_in, read_mode

if TYPE_CHECKING:
    from autoaccum.devices.in_place.subjects import LiveObjects
    from autoaccum.workload.spec import Workload

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Subject:
    """What is tried, and where.

    Attributes:
        device: Runs its trials; to be closed.
        reference: What the plan calls it.
        isolated: Whether a trial in a process of its own may end otherwise than one after others.
    """

    device: Device
    reference: str
    isolated: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `plan` that say how trials run, as they were given; `verb` is what messages call it.

    `is_stopped` and `checkout` are those of `TrialSettings`.
    """

    share: int
    reduction: str | None = None
    optimizer: Any = None
    precision: str | None = None
    device: str = "auto"
    gpu: str | None = None
    memory: str | MemorySize | None = None
    reserve: str | MemorySize | None = None
    trial_limit: float = 600.0
    load_limit: float | None = None
    keeps: Any = None
    evaluation_batch: int | None = None
    worst_of: int | None = None
    batchnorm: Any = None
    multiple_of: int | None = None
    accumulate_in: Any = None
    on_output: Callable[[str], None] | None = None
    verb: str = "plan"
    is_stopped: Callable[[], bool] | None = None
    checkout: Checkout | None = None


def find_subject(workload: Any, parts: Mapping[str, Any], settings: Settings) -> Subject:
    """Choose the way that trials run.

    Args:
        workload: A reference, a Workload, or None.
        parts: `model`, `batch`, `loss`, `criterion`, `weight`, `evaluate`, `split` and `size` of live objects; None
            where not given.
        settings: How trials run.

    Raises:
        UsageError: Not exactly one of the ways is given, or a setting cannot be honoured.
        WorkloadError: The live objects do not go together.
        NotMeasuredError: Memory cannot be limited on this machine.
    """
    precision = _check_precision(settings.precision)
    settings = _checked(settings)
    if settings.gpu is not None and (workload is not None or _given(parts, settings)):
        _check_simulated(settings)
    trial_limit = check_seconds(settings.trial_limit, "the trial limit", "give the seconds a trial may take")
    memory, reserve = _size(settings.memory, "memory"), _size(settings.reserve, "reserve")
    way = choose_way(workload, parts, settings)
    if not isinstance(way, str) and settings.gpu is None:
        return _in_place(way, settings, memory, reserve)
    reference = way if isinstance(way, str) else f"{way.name} (made in code)"
    trials = TrialSettings(
        reference=reference,
        parcel=None if isinstance(way, str) else _packed(way),
        share=settings.share,
        precision=precision,
        optimizer=settings.optimizer if isinstance(way, str) else None,
        trial_limit_seconds=trial_limit,
        load_limit_seconds=settings.load_limit,
        keeps=settings.keeps,
        evaluation_batch=settings.evaluation_batch,
        worst_of=settings.worst_of if isinstance(way, str) else None,
        batchnorm=settings.batchnorm,
        multiple_of=settings.multiple_of,
        accumulate_in=settings.accumulate_in,
        is_stopped=settings.is_stopped,
        checkout=settings.checkout,
    )
    if settings.gpu is not None:
        simulated = simulate_device(settings.gpu, trials, memory=memory, reserve=reserve, on_output=settings.on_output)
        return Subject(simulated, reference, isolated=False)
    made = make_device(settings.device, trials, memory=memory, reserve=reserve, on_output=settings.on_output)
    return Subject(made, reference)


def choose_way(workload: Any, parts: Mapping[str, Any], settings: Settings) -> str | Workload | LiveObjects:
    """What is given, in one of the ways: a reference, a Workload with what was asked for in place of its own, or parts.

    Args:
        workload: As in `find_subject`.
        parts: Likewise.
        settings: Likewise; `verb` is the function that messages name.

    Raises:
        UsageError: Not exactly one of the ways is given, or a setting cannot be honoured.
        WorkloadError: The live objects do not go together.
    """
    given = _given(parts, settings)
    if workload is None:
        return _live_objects(parts, given, settings, _check_precision(settings.precision))
    if given:
        raise UsageError(f"a workload is given, and {_listed(given)} too", hint=_ways(settings))
    if not isinstance(workload, (str, os.PathLike)):
        return _adapted(workload, settings)
    if settings.optimizer is not None and not isinstance(settings.optimizer, str):
        raise UsageError(
            f"optimizer is {_kind(settings.optimizer)}, and the workload is a file",
            hint="give a name of torch.optim, or write def optimizer(params) in the file",
        )
    return os.fspath(workload)


def _given(parts: Mapping[str, Any], settings: Settings) -> list[str]:
    return [name for name, value in {**parts, "reduction": settings.reduction}.items() if value is not None]


def _ways(settings: Settings) -> str:
    ways = '{0}("model.py", ...), {0}(Workload(...), ...), or {0}(model=..., batch=..., loss=..., ...)'
    return f"give one: {ways.format(settings.verb)}"


def _check_simulated(settings: Settings) -> None:
    """Refuse what a card that is not there does not go together with."""
    if not isinstance(settings.gpu, str):
        raise UsageError(
            f"gpu is {settings.gpu!r}", hint='give the name of a card or a size with its unit: "rtx3090", "24GiB"'
        )
    if settings.device != "auto":
        raise UsageError(
            f"both --device {settings.device} and --gpu {settings.gpu} are given",
            hint="--device measures on what is here, --gpu predicts for a card that need not be: take one",
        )


def _packed(subject: Workload | LiveObjects) -> str:
    """What is to be simulated, for a process of its own: simulation changes torch for all that runs in one."""
    from autoaccum.devices.in_place import LiveObjects
    from autoaccum.devices.parcels import pack

    if isinstance(subject, LiveObjects):
        return pack(subject.as_workload(), subject.model, subject.live_optimizer)
    return pack(subject)


def _in_place(
    subject: Workload | LiveObjects, settings: Settings, memory: MemorySize | None, reserve: MemorySize | None
) -> Subject:
    from autoaccum.devices.in_place import InPlaceDevice

    check_device(settings.device)
    made = InPlaceDevice(subject, share=settings.share, device=settings.device, memory=memory, reserve=reserve)
    return Subject(made, f"{subject.name} (in this process)", isolated=False)


def _live_objects(
    parts: Mapping[str, Any], given: list[str], settings: Settings, precision: Precision | None
) -> LiveObjects:
    if not given:
        raise UsageError(f"there is nothing to {settings.verb}", hint=_ways(settings))
    missing = [name for name in ("model", "batch") if parts[name] is None]
    if missing:
        raise UsageError(f"{_listed(given)} given, {_listed(missing)} missing", hint=_ways(settings))
    if settings.worst_of is not None:
        raise UsageError(
            f"worst_of is {settings.worst_of}, and live objects have no dataset",
            hint=f"{settings.verb} a file or a Workload with a dataset, or give a batch that is the worst case",
        )
    if parts.get("evaluate") is not None and settings.evaluation_batch is None:
        raise UsageError("evaluate is given without evaluation_batch", hint="say how many samples a pass has")
    from torch import nn

    from autoaccum.devices.in_place import LiveObjects
    from autoaccum.workload.batches import read_batching
    from autoaccum.workload.weights import resolve_objective

    objective = resolve_objective(
        parts["loss"],
        criterion=parts["criterion"],
        weight=parts["weight"],
        reduction="mean" if settings.reduction is None else settings.reduction,
        model=parts["model"] if isinstance(parts["model"], nn.Module) else None,
    )
    objective = dataclasses.replace(objective, batching=read_batching(parts.get("split"), parts.get("size")))
    return LiveObjects(
        model=parts["model"],
        batch=parts["batch"],
        objective=objective,
        optimizer=settings.optimizer,
        precision=precision or "fp32",
        keeps=settings.keeps or (),
        evaluation_batch=settings.evaluation_batch,
        evaluate=parts.get("evaluate"),
        batchnorm=settings.batchnorm or "micro",
        multiple_of=settings.multiple_of,
        accumulate_in=settings.accumulate_in or "fp32",
        name=type(parts["model"]).__name__,
    )


def _adapted(workload: Any, settings: Settings) -> Workload:
    """The Workload, with what was asked for in place of its own."""
    from autoaccum.workload.adaptation import adapt
    from autoaccum.workload.spec import Workload

    if not isinstance(workload, Workload):
        raise UsageError(f"the workload is {_kind(workload)}", hint=_ways(settings))
    names = ("precision", "optimizer", "keeps", "evaluation_batch", "batchnorm", "multiple_of", "accumulate_in")
    asked = {name: getattr(settings, name) for name in names}
    return adapt(workload, most=settings.share, worst_of=settings.worst_of, **asked)


def _checked(settings: Settings) -> Settings:
    """The settings, with what is kept as a tuple.

    Raises:
        UsageError: A word, a mode or a number of samples is none.
    """
    try:
        for name in ("evaluation_batch", "worst_of", "multiple_of"):
            read_count(getattr(settings, name), name)
        if settings.batchnorm is not None:
            read_mode(settings.batchnorm)
        if settings.accumulate_in is not None:
            read_accumulate_in(settings.accumulate_in)
        keeps = None if settings.keeps is None else read_keeps(settings.keeps)
    except WorkloadError as error:
        raise UsageError(error.message, hint=error.hint) from None
    return dataclasses.replace(settings, keeps=keeps)


def _check_precision(precision: str | None) -> Precision | None:
    known = get_args(Precision)
    if precision is not None and precision not in known:
        raise UsageError(f"there is no precision {precision!r}", hint=f"take {', '.join(known)}")
    return cast("Precision | None", precision)


def _size(size: str | MemorySize | None, what: str) -> MemorySize | None:
    if size is None or isinstance(size, MemorySize):
        return size
    if isinstance(size, str):
        return parse_size(size)
    raise UsageError(f"{what} is {size!r}", hint='write its unit too, such as "10GiB" or "80%"')


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
