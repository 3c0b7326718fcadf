"""Resolves the workload of a plan (a file, a Workload or live objects) and makes the device that runs its trials."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autoaccum.checks import join_words
from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.device_choice import make_device
from autoaccum.errors import UsageError
from autoaccum.messages import Message
from autoaccum.options import Options
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.sources.command import check_target
from autoaccum.sources.source import FileSource, Source, find_source

if TYPE_CHECKING:
    from autoaccum.devices.child.import_paths import ImportPaths
    from autoaccum.devices.live_objects import LiveTensors
    from autoaccum.sources.workload import Workload


@dataclass(frozen=True)
class PlanSetup:
    """The device that runs the trials of a plan, and the settings that it was made with.

    Attributes:
        device: The device; the caller closes it, or uses `running`.
        settings: The settings of its trials, with which other devices can be made.
        live: Tensors of the caller on the card, which trials need; None: there are none.
        files: Closes what the children read.
    """

    device: Device
    settings: TrialSettings
    live: LiveTensors | None = None
    files: ExitStack = field(default_factory=ExitStack)

    @property
    def notes(self) -> tuple[Message, ...]:
        """What the plan says of the caller's objects."""
        return () if self.live is None else (self.live.note,)

    @contextmanager
    def running(self) -> Iterator[Device]:
        """Return the device, with the caller's tensors in host memory meanwhile; close everything at the end."""
        with ExitStack() as stack:
            stack.enter_context(self.files)
            if self.live is not None:
                stack.enter_context(self.live.on_host())
            yield stack.enter_context(self.device)


def make_setup(
    workload: Any,
    request: PlanRequest,
    *,
    live: Mapping[str, Any] | None = None,
    paths: ImportPaths | None = None,
    on_output: Callable[[str], None] | None = None,
    verb: str = "plan",
) -> PlanSetup:
    """Resolve the workload and make the device that runs its trials.

    Args:
        workload: The name of a file, a Workload, a command, or None where live objects are given.
        request: The target batch, the options, and the limits of the search.
        live: A `trainer`, or live objects: `model`, `batch`, `loss`, `criterion`, `outputs`, `coupled_loss`, `weight`,
            `reduction`, `evaluate`, `split` and `size`; those not given are None or left out. With a Trainer of
            Lightning go `model`, `data` and `weight`.
        paths: Where the workload's modules are; None: where this process finds them.
        on_output: Receives each line the workload prints; stderr otherwise.
        verb: The command named in messages.

    Raises:
        UsageError: Not exactly one of the three is given, an option cannot be honoured, or an object cannot be sent to
            the processes of the trials.
        WorkloadError: The live objects do not go together.
        NotMeasuredError: Memory cannot be limited on this machine.
    """
    options = request.options
    check_target(workload, request.target_batch, prefer=request.prefer, simulates=options.gpu is not None)
    given: Any = workload
    if not isinstance(given, Source):
        given = resolve_workload(workload, live or {}, options, rank_samples=request.rank_samples, verb=verb)
    tensors = None
    with ExitStack() as files:
        if isinstance(given, Source):
            source: Source = given
            if isinstance(source, FileSource) and paths is None:
                source.check_overrides()  # Before any process starts.
        else:
            from autoaccum.devices.child.pickling import pack

            options = options.with_spec(optimizer=None, longest_of=None)  # They are pickled with the workload.
            if options.gpu is None:
                optimizer = request.options.spec.get("optimizer")
                options, tensors = _place(given, options, optimizer, is_live=workload is None)
            folder = Path(files.enter_context(TemporaryDirectory(prefix="autoaccum-")))
            source = pack(given, folder, simulates=options.gpu is not None, with_values=options.values is not None)
        settings = TrialSettings(
            source=source,
            rank_samples=request.rank_samples,
            options=options,
            load_limit_seconds=request.load_limit_seconds,
            paths=paths,
            on_output=on_output,
        )
        return PlanSetup(make_device(settings), settings, tensors, files.pop_all())


def _place(
    workload: Workload, options: Options, optimizer: Any, *, is_live: bool
) -> tuple[Options, LiveTensors | None]:
    """Return the options with the device where a live model is, and what it and its optimizer hold on a card."""
    from torch import nn

    from autoaccum.accumulation.backpropagation import model_device
    from autoaccum.devices.live_objects import LiveTensors, choose_device

    model = workload.model
    device = choose_device(model, options.device)
    if device == "auto" and is_live and not getattr(workload.loss, "moves_model", False):
        device = "cpu"  # A Trainer of Lightning moves the model when it fits.
    options = dataclasses.replace(options, device=device)
    if isinstance(model, nn.Module) and model_device(model).type == "cuda":
        return options, LiveTensors.of(model, optimizer)
    return options, None


def refuse_overrides(options: Options) -> None:
    """Raise UsageError if values are given by name, for a workload that is made in code."""
    if options.overrides:
        raise UsageError(
            f"{join_words(options.overrides)} cannot be set (--set): the workload is made in code",
            hint="make it with other values, or give a file, a command or a model by name",
        )


def resolve_workload(
    workload: Any, live: Mapping[str, Any], options: Options, *, rank_samples: int, verb: str = "plan"
) -> FileSource | Workload:
    """Return what was given: a file, or a Workload with the options in place of its own.

    The model of a Workload of live objects is the live one.

    Raises:
        UsageError: Not exactly one way is taken, or an argument does not go with it.
        WorkloadError: The Workload or the live objects cannot be used with these options.
    """
    given = [name for name, value in live.items() if value is not None]
    if workload is not None and given:
        raise UsageError(f"a workload is given, and {join_words(given)} too", hint=_usage(verb))
    if isinstance(workload, (str, os.PathLike)):
        optimizer = options.spec.get("optimizer")
        if not isinstance(optimizer, str | None):
            raise UsageError(
                f"optimizer is of type {type(optimizer).__name__}, and the workload is a file",
                hint="give a name of torch.optim, or write def optimizer(params) in the file",
            )
        return find_source(workload, options.overrides)
    refuse_overrides(options)
    from autoaccum.sources.samples import apply_spec  # With torch, which a file needs in a child alone.
    from autoaccum.sources.workload import Workload

    if workload is None and live.get("trainer") is None:
        return _read_live_objects(live, given, options, verb)
    if workload is None:
        workload = _read_trainer(live, given)
    if not isinstance(workload, Workload):
        raise UsageError(f"the workload is of type {type(workload).__name__}", hint=_usage(verb))
    return apply_spec(workload, options.spec, largest_batch=rank_samples)


def _read_trainer(live: Mapping[str, Any], given: list[str]) -> Workload:
    """Return the Workload of a Trainer, whose model shares the tensors of the Trainer's."""
    from torch import nn

    from autoaccum.sources.loading import workload_of

    trainer = live["trainer"]
    workload = workload_of(trainer, live=True, **{name: live[name] for name in given if name != "trainer"})
    if workload is None:
        raise UsageError(
            f"trainer is of type {type(trainer).__name__}", hint="give a Trainer of transformers or Lightning"
        )
    model = workload.model if isinstance(workload.model, nn.Module) else workload.make_model()
    return dataclasses.replace(workload, model=model)


def _usage(verb: str) -> str:
    ways = (
        '{0}("model.py", ...), {0}(Workload(...), ...), {0}(trainer=...), or {0}(model=..., batch=..., loss=..., ...)'
    )
    return f"give one: {ways.format(verb)}"


def _read_live_objects(live: Mapping[str, Any], given: list[str], options: Options, verb: str) -> Workload:
    if "data" in given:
        raise UsageError("data is given without a trainer", hint="give the Trainer, too: trainer=trainer")
    if not given:
        raise UsageError(f"there is nothing to {verb}", hint=_usage(verb))
    missing = [name for name in ("model", "batch") if live.get(name) is None]
    if missing:
        raise UsageError(f"{join_words(given)} given, {join_words(missing)} missing", hint=_usage(verb))
    if (longest_of := options.spec.get("longest_of")) is not None:
        raise UsageError(
            f"longest_of is {longest_of}, and live objects have no dataset",
            hint=f"{verb} a file or a Workload with a dataset, or give a batch that is the worst case",
        )
    if live.get("evaluate") is not None and "evaluation_batch" not in options.spec:
        raise UsageError("evaluate is given without evaluation_batch", hint="say how many samples a pass has")
    from autoaccum.devices.live_objects import workload_of_objects

    return workload_of_objects(live, options)
