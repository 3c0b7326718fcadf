"""What is to be planned, as it was given: a file, a Workload, or live objects; and the device its trials run on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum.checks import join_words
from autoaccum.devices.base import Device, TrialSettings
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.planning.device_choice import check_device, make_device

if TYPE_CHECKING:
    from autoaccum.devices.in_place.live_objects import LiveObjects
    from autoaccum.workload.spec import Workload


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


def find_subject(workload: Any, parts: Mapping[str, Any], settings: TrialSettings, *, verb: str = "plan") -> Subject:
    """Choose the way that trials run.

    Args:
        workload: A reference, a Workload, or None.
        parts: `model`, `batch`, `loss`, `criterion`, `weight`, `reduction`, `evaluate`, `split` and `size` of live
            objects; those not given are None or left out.
        settings: How trials run; the reference is set here.
        verb: What messages call it.

    Raises:
        UsageError: Not exactly one of the ways is given, or an option cannot be honoured.
        WorkloadError: The live objects do not go together.
        NotMeasuredError: Memory cannot be limited on this machine.
    """
    options = settings.options
    way = choose_way(workload, parts, options, share=settings.share, verb=verb)
    if isinstance(way, str):
        settings = dataclasses.replace(settings, reference=way)
    elif options.gpu is None:
        return _in_place(way, settings)
    else:
        options = dataclasses.replace(options, optimizer=None, worst_of=None)  # They are part of the parcel.
        reference = f"{way.name} (made in code)"
        settings = dataclasses.replace(settings, reference=reference, parcel=_packed(way), options=options)
    return Subject(make_device(settings), settings.reference, isolated=options.gpu is None)


def choose_way(
    workload: Any, parts: Mapping[str, Any], options: Options, *, share: int, verb: str = "plan"
) -> str | Workload | LiveObjects:
    """What is given, in one of the ways: a reference, a Workload with the options in place of its own, or live objects.

    Raises:
        UsageError: Not exactly one of them is given, or what does not go with it.
        WorkloadError: The Workload or the live objects cannot be used so.
    """
    given = [name for name, value in parts.items() if value is not None]
    if workload is None:
        return _live_objects(parts, given, options, verb)
    if given:
        raise UsageError(f"a workload is given, and {join_words(given)} too", hint=_ways(verb))
    if not isinstance(workload, (str, os.PathLike)):
        return _adapted(workload, options, share, verb)
    if options.optimizer is not None and not isinstance(options.optimizer, str):
        raise UsageError(
            f"optimizer is of type {type(options.optimizer).__name__}, and the workload is a file",
            hint="give a name of torch.optim, or write def optimizer(params) in the file",
        )
    return os.fspath(workload)


def _ways(verb: str) -> str:
    ways = '{0}("model.py", ...), {0}(Workload(...), ...), or {0}(model=..., batch=..., loss=..., ...)'
    return f"give one: {ways.format(verb)}"


def _packed(subject: Workload | LiveObjects) -> str:
    """What is to be simulated, for a process of its own: simulation changes torch for all that runs in one."""
    from autoaccum.devices.child.pickling import pack
    from autoaccum.devices.in_place import LiveObjects

    if isinstance(subject, LiveObjects):
        return pack(subject.as_workload(), subject.model, subject.live_optimizer)
    return pack(subject)


def _in_place(subject: Workload | LiveObjects, settings: TrialSettings) -> Subject:
    from autoaccum.devices.in_place import InPlaceDevice

    options = settings.options
    check_device(options.device)
    made = InPlaceDevice(
        subject, share=settings.share, device=options.device, memory=options.memory, reserve=options.reserve
    )
    return Subject(made, f"{subject.name} (in this process)", isolated=False)


def _live_objects(parts: Mapping[str, Any], given: list[str], options: Options, verb: str) -> LiveObjects:
    if not given:
        raise UsageError(f"there is nothing to {verb}", hint=_ways(verb))
    missing = [name for name in ("model", "batch") if parts.get(name) is None]
    if missing:
        raise UsageError(f"{join_words(given)} given, {join_words(missing)} missing", hint=_ways(verb))
    if options.worst_of is not None:
        raise UsageError(
            f"worst_of is {options.worst_of}, and live objects have no dataset",
            hint=f"{verb} a file or a Workload with a dataset, or give a batch that is the worst case",
        )
    if parts.get("evaluate") is not None and options.evaluation_batch is None:
        raise UsageError("evaluate is given without evaluation_batch", hint="say how many samples a pass has")
    from torch import nn

    from autoaccum.devices.in_place import LiveObjects
    from autoaccum.workload.batches import read_batching
    from autoaccum.workload.objective import resolve_objective

    objective = resolve_objective(
        parts.get("loss"),
        criterion=parts.get("criterion"),
        weight=parts.get("weight"),
        reduction=parts.get("reduction") or "mean",
        model=parts["model"] if isinstance(parts["model"], nn.Module) else None,
    )
    return LiveObjects(
        model=parts["model"],
        batch=parts["batch"],
        objective=dataclasses.replace(objective, batching=read_batching(parts.get("split"), parts.get("size"))),
        evaluate=parts.get("evaluate"),
        name=type(parts["model"]).__name__,
        options=options,
    )


def _adapted(workload: Any, options: Options, share: int, verb: str) -> Workload:
    """The Workload, with the options in place of its own."""
    from autoaccum.workload.samples import apply_settings
    from autoaccum.workload.spec import Workload

    if not isinstance(workload, Workload):
        raise UsageError(f"the workload is of type {type(workload).__name__}", hint=_ways(verb))
    return apply_settings(workload, most=share, worst_of=options.worst_of, **options.overrides)
