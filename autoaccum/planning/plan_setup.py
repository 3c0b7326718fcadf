"""Resolves the workload of a plan (a file, a Workload or live objects) and makes the device that runs its trials."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum.checks import join_words
from autoaccum.devices.base import Device, TimingDevice, TrialSettings
from autoaccum.devices.explanation import ExplainingDevice, PredictingDevice
from autoaccum.devices.update_cost import CountingDevice
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.planning.device_choice import check_device, check_values, make_device
from autoaccum.planning.plan_request import PlanRequest

if TYPE_CHECKING:
    from autoaccum.devices.child.import_paths import Checkout
    from autoaccum.devices.in_place.live_objects import LiveObjects
    from autoaccum.workload.spec import Workload


@dataclass(frozen=True)
class PlanSetup:
    """The workload's name and the device that runs its trials.

    Attributes:
        device: The device; the caller closes it.
        reference: The name of the workload in the plan.
        isolated: Whether a trial in a fresh process may end differently from one that follows others.
    """

    device: Device
    reference: str
    isolated: bool = True


def make_setup(
    workload: Any,
    request: PlanRequest,
    *,
    live: Mapping[str, Any] | None = None,
    checkout: Checkout | None = None,
    on_output: Callable[[str], None] | None = None,
    verb: str = "plan",
    device_maker: Callable[[TrialSettings], Device] | None = None,
) -> PlanSetup:
    """Resolve the workload and make the device that runs its trials.

    Args:
        workload: A reference, a Workload, or None where live objects are given.
        request: The target batch, the options, and the limits of the search.
        live: A `trainer`, or live objects: `model`, `batch`, `loss`, `criterion`, `outputs`, `coupled_loss`, `weight`,
            `reduction`, `evaluate`, `split` and `size`; those not given are None or left out. With a Trainer of
            Lightning go `model`, `data` and `weight`.
        checkout: The folder the workload's modules are imported from; None: this process's import path.
        on_output: Receives each line the workload prints in processes of its own; stderr otherwise.
        verb: The command named in messages.
        device_maker: Makes the device, but for trials in this process; None: `make_device`.

    Raises:
        UsageError: Not exactly one of the three is given, or an option cannot be honoured.
        WorkloadError: The live objects do not go together.
        NotMeasuredError: Memory cannot be limited on this machine.
    """
    options = request.options
    resolved = resolve_workload(workload, live or {}, options, share=request.share, verb=verb)
    settings = TrialSettings(
        share=request.share,
        options=options,
        load_limit_seconds=request.load_limit_seconds,
        checkout=checkout,
        on_output=on_output,
    )
    if isinstance(resolved, str):
        settings = dataclasses.replace(settings, reference=resolved)
    elif options.gpu is None:
        from autoaccum.devices.in_place import InPlaceDevice

        check_values(options)
        check_device(options.device)
        device = InPlaceDevice(
            resolved, share=request.share, device=options.device, memory=options.memory, reserve=options.reserve
        )
        return PlanSetup(device, f"{resolved.name} (in this process)", isolated=False)
    else:
        options = dataclasses.replace(options, optimizer=None, worst_of=None)  # They are pickled with the workload.
        reference = f"{resolved.name} (made in code)"
        settings = dataclasses.replace(
            settings, reference=reference, pickled=_pickle(resolved, options), options=options
        )
    return PlanSetup((device_maker or make_device)(settings), settings.reference, isolated=options.gpu is None)


def resolve_workload(
    workload: Any, live: Mapping[str, Any], options: Options, *, share: int, verb: str = "plan"
) -> str | Workload | LiveObjects:
    """Return what was given: a reference, a Workload with the options in place of its own, or live objects.

    Raises:
        UsageError: Not exactly one of the three is given, or an argument does not go with it.
        WorkloadError: The Workload or the live objects cannot be used with these options.
    """
    given = [name for name, value in live.items() if value is not None]
    if workload is None:
        if live.get("trainer") is not None:
            return _read_trainer(live, given, options, share, verb)
        if "data" in given:
            raise UsageError("data is given without a trainer", hint="give the Trainer, too: trainer=trainer")
        return _read_live_objects(live, given, options, verb)
    if given:
        raise UsageError(f"a workload is given, and {join_words(given)} too", hint=_usage(verb))
    if not isinstance(workload, (str, os.PathLike)):
        return _with_options(workload, options, share, verb)
    if options.optimizer is not None and not isinstance(options.optimizer, str):
        raise UsageError(
            f"optimizer is of type {type(options.optimizer).__name__}, and the workload is a file",
            hint="give a name of torch.optim, or write def optimizer(params) in the file",
        )
    return os.fspath(workload)


def _read_trainer(
    live: Mapping[str, Any], given: list[str], options: Options, share: int, verb: str
) -> Workload | LiveObjects:
    """Return what a Trainer trains: live objects that share its model's tensors, or for Lightning a Workload."""
    from torch import nn

    from autoaccum.devices.in_place import LiveObjects
    from autoaccum.workload.samples import take_longest
    from autoaccum.workload.trainers import workload_of

    trainer = live["trainer"]
    workload = workload_of(trainer, live=True, **{name: live[name] for name in given if name != "trainer"})
    if workload is None:
        raise UsageError(
            f"trainer is of type {type(trainer).__name__}", hint="give a Trainer of transformers or Lightning"
        )
    if isinstance(workload.model, nn.Module):
        return _with_options(workload, options, share, verb)
    if options.worst_of is not None:
        workload = take_longest(workload, options.worst_of, share)
    return LiveObjects.of_workload(workload, options)


def _usage(verb: str) -> str:
    ways = (
        '{0}("model.py", ...), {0}(Workload(...), ...), {0}(trainer=...), or {0}(model=..., batch=..., loss=..., ...)'
    )
    return f"give one: {ways.format(verb)}"


def _pickle(workload: Workload | LiveObjects, options: Options) -> str:
    """Pickle the workload for a process of its own: a simulation changes torch for everything in its process."""
    from autoaccum.devices.child.pickling import pack
    from autoaccum.devices.in_place import LiveObjects

    with_values = options.values is not None
    if isinstance(workload, LiveObjects):
        return pack(workload.as_workload(), workload.model, workload.live_optimizer, with_values=with_values)
    return pack(workload, with_values=with_values)


def _read_live_objects(live: Mapping[str, Any], given: list[str], options: Options, verb: str) -> LiveObjects:
    if not given:
        raise UsageError(f"there is nothing to {verb}", hint=_usage(verb))
    missing = [name for name in ("model", "batch") if live.get(name) is None]
    if missing:
        raise UsageError(f"{join_words(given)} given, {join_words(missing)} missing", hint=_usage(verb))
    if options.worst_of is not None:
        raise UsageError(
            f"worst_of is {options.worst_of}, and live objects have no dataset",
            hint=f"{verb} a file or a Workload with a dataset, or give a batch that is the worst case",
        )
    if live.get("evaluate") is not None and options.evaluation_batch is None:
        raise UsageError("evaluate is given without evaluation_batch", hint="say how many samples a pass has")
    from torch import nn

    from autoaccum.devices.in_place import LiveObjects
    from autoaccum.workload.batches import read_batching
    from autoaccum.workload.objective import read_coupled_loss, resolve_objective

    objective = resolve_objective(
        read_coupled_loss(live.get("loss"), live.get("outputs"), live.get("coupled_loss")),
        criterion=live.get("criterion"),
        weight=live.get("weight"),
        reduction=live.get("reduction") or "mean",
        model=live["model"] if isinstance(live["model"], nn.Module) else None,
    )
    return LiveObjects(
        model=live["model"],
        batch=live["batch"],
        objective=dataclasses.replace(objective, batching=read_batching(live.get("split"), live.get("size"))),
        evaluate=live.get("evaluate"),
        name=type(live["model"]).__name__,
        options=options,
    )


def _with_options(workload: Any, options: Options, share: int, verb: str) -> Workload:
    """Return the Workload with the options in place of its own."""
    from autoaccum.workload.samples import apply_settings
    from autoaccum.workload.spec import Workload

    if not isinstance(workload, Workload):
        raise UsageError(f"the workload is of type {type(workload).__name__}", hint=_usage(verb))
    return apply_settings(workload, largest_batch=share, worst_of=options.worst_of, **options.overrides)


def check_device_can(setup: PlanSetup, request: PlanRequest) -> None:
    """Raise UsageError before any trial if the device gives no explanation or speed that is requested."""
    device = setup.device
    if request.prefer == "fastest" and not isinstance(device, (TimingDevice, CountingDevice)):
        raise UsageError(
            'prefer="fastest" (--prefer fastest) times updates in a process of their own, and trials of live objects,'
            " or of a Workload made in code, run in this one",
            hint="plan a file, or leave it out",
        )
    if not request.explain or isinstance(device, ExplainingDevice):
        return
    if setup.isolated or isinstance(device, PredictingDevice):
        raise UsageError(
            f"explain (--explain) shows where the memory of a card goes, and trials run on the {device.name.upper()}",
            hint="predict for a card, which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)",
        )
    raise UsageError(
        "explain shows where the memory of a card goes, which trials in this process cannot tell",
        hint="predict for a card, which need not be here: gpu=NAME",
    )
