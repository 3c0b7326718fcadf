"""Makes the Device of `--device` or `--gpu`, or an error that says what is missing on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.installed_torch import read_torch_release, torch_build
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.sources.command import CommandSource

if TYPE_CHECKING:
    from autoaccum.devices.simulated.simulated_device import SimulatedDevice
    from autoaccum.devices.simulated.simulation_requests import Tracer
    from autoaccum.devices.simulated.trace_cache import TraceCache
    from autoaccum.simulation.cards import Card

_Result = TypeVar("_Result")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
_WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")


def make_device(settings: TrialSettings) -> Device:
    """Make the device of the options: a simulated card, or `auto`, `cpu`, `cuda` or `cuda:N`.

    Only CUDA knows whether a card has that index, so a wrong index fails with the first trial.

    Raises:
        UsageError: There is no such device, or it cannot be used on this machine.
        NotMeasuredError: Memory cannot be limited on this machine.
    """
    options = settings.options
    if options.gpu is not None:
        return make_simulated(settings, options.gpu)
    if options.values is not None:
        raise UsageError("--values is for a simulated card", hint="name one (--gpu NAME), or leave --values out")
    check_device(options.device)
    index = card_index(options.device)
    if isinstance(settings.source, CommandSource):
        from autoaccum.devices.command.command_device import CommandDevice

        return CommandDevice(settings, index)
    if index is None:
        from autoaccum.devices.cpu import CpuDevice

        return CpuDevice(settings)
    from autoaccum.devices.cuda import CudaDevice

    return CudaDevice(settings, index=index)


def make_simulated(settings: TrialSettings, gpu: str) -> SimulatedDevice:
    """Make the simulated card of this name or size; raise UsageError if there is none."""
    from autoaccum.devices.simulated.simulated_device import SimulatedDevice
    from autoaccum.simulation.cards import find_card

    card = find_card(gpu)
    kind, make_tracer = _tracing(settings)
    traces = kind(partial(make_tracer, card), settings.rank_samples)
    return SimulatedDevice(card, traces, **_simulated_fields(settings))


def run_on_cards(
    settings: TrialSettings, cards: Sequence[Card], run: Callable[[Card, Device], _Result], *, confirms: bool
) -> Generator[tuple[Card, _Result], None, None]:
    """Run something on simulated cards, whatever card the options name; as `trace_cache.run_on_cards`."""
    from autoaccum.devices.simulated import trace_cache
    from autoaccum.devices.simulated.simulated_device import SimulatedDevice

    fields, (kind, make_tracer) = _simulated_fields(settings), _tracing(settings)
    return trace_cache.run_on_cards(
        cards,
        lambda card, traces: run(card, SimulatedDevice(card, traces, **fields)),
        make_tracer,
        settings.rank_samples,
        confirms=confirms,
        kind=kind,
    )


def _tracing(settings: TrialSettings) -> tuple[type[TraceCache], Callable[..., Tracer]]:
    """Return what keeps the traces of the source, and what starts a process that makes them on a card."""
    if isinstance(settings.source, CommandSource):
        from autoaccum.devices.command.command_tracer import CommandTracer, CommandTraces
        from autoaccum.devices.command.observations import Observations

        return CommandTraces, partial(CommandTracer, settings, Observations(settings))
    from autoaccum.devices.simulated.simulation_requests import Tracer
    from autoaccum.devices.simulated.trace_cache import TraceCache

    return TraceCache, partial(Tracer, settings)


def _simulated_fields(settings: TrialSettings) -> dict[str, Any]:
    options = settings.options
    return {
        "torch_version": read_torch_release(),
        "memory": options.memory,
        "reserve": options.reserve,
        "communicators": 0 if options.world_size == 1 else len(options.mesh or (options.world_size,)),
    }


def card_index(name: str) -> int | None:
    """Return the index of the card `name`; None for the CPU.

    `auto` is a card where torch is built for CUDA and the driver shows one, else the CPU. Without an index it is the
    first card; of the ranks of a launcher, each takes that of its LOCAL_RANK.
    """
    if name == "auto":
        name = "cuda" if torch_build()[1] is not None and has_nvidia_gpu() else "cpu"
    kind, _, index = name.partition(":")
    return None if kind == "cpu" else int(index or os.environ.get("LOCAL_RANK") or 0)


def has_device_for_each(options: Options) -> bool:
    """Return whether ranks of `options` could each try on a device of their own, all at once, on this machine.

    On the CPU that is so where a budget for each is given; else they would compete for what is free.
    """
    if options.world_size == 1 or options.gpu is not None:
        return False
    if options.device == "cpu":
        return options.memory is not None
    if options.device not in ("auto", "cuda") or card_index("auto") is None:
        return False
    import torch

    return torch.cuda.device_count() >= options.world_size


def check_device(name: str) -> None:
    """Raise UsageError if the device cannot be used on this machine, before anything is started."""
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        raise UsageError(f"there is no device {name!r}", hint="take auto, cpu, cuda or cuda:N")
    if not name.startswith("cuda"):
        return
    version, cuda = torch_build()
    if cuda is None:
        raise UsageError(
            f"--device {name}: the torch installed here ({version}) is the CPU build, without CUDA",
            hint="install a CUDA build of torch (https://pytorch.org/get-started/locally), or take --device cpu",
        )
    if not has_nvidia_gpu():
        raise UsageError(
            f"--device {name}: torch {version} is built for CUDA {cuda}, but no NVIDIA GPU is visible here",
            hint="install or repair the NVIDIA driver (nvidia-smi should list the card), or take --device cpu",
        )


def check_named_device(name: str) -> None:
    """Raise UsageError as `check_device`, and for `auto`, too."""
    if name == "auto":
        raise UsageError("there is no device 'auto' to verify on", hint="take cpu, cuda or cuda:N")
    check_device(name)


def has_nvidia_gpu(devices: Path = Path("/dev"), wsl_driver: Path = _WSL_DRIVER) -> bool:
    """Return whether this process may use an NVIDIA card, without calling torch or the driver.

    WSL has `/dev/dxg` for cards of any vendor, and the driver's library for NVIDIA's alone.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if (devices / "dxg").exists() and wsl_driver.exists():
        return True
    return any(re.fullmatch(r"nvidia\d+", entry.name) for entry in devices.glob("nvidia*"))
