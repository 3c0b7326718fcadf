"""Settings of torch that hold for the whole process, and that a forward may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.backends import cudnn


class _Flag(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _flags() -> dict[str, _Flag]:
    return {
        "default dtype": _Flag(torch.get_default_dtype, torch.set_default_dtype),
        "default device": _Flag(torch.get_default_device, _set_default_device),
        "grad mode": _Flag(torch.is_grad_enabled, _set_grad_mode),
        "anomaly mode": _Flag(torch.is_anomaly_enabled, _set_anomaly_mode),
        "threads": _Flag(torch.get_num_threads, torch.set_num_threads),
        "deterministic algorithms": _Flag(_deterministic, _set_deterministic),
        "current card": _Flag(_current_card, _set_card),
        **{f"cudnn.{name}": _cudnn(name) for name in ("benchmark", "deterministic", "enabled")},
    }


class Flags:
    """The settings as they are now."""

    def __init__(self) -> None:
        self._before = {name: flag.read() for name, flag in _flags().items()}

    def restore(self) -> None:
        """Set again those that were changed; the others are not touched."""
        for name, flag in _flags().items():
            if flag.read() != self._before[name]:
                flag.write(self._before[name])


def _cudnn(name: str) -> _Flag:
    return _Flag(lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_grad_mode(value: bool) -> None:
    torch.set_grad_enabled(value)


def _set_anomaly_mode(value: bool) -> None:
    torch.autograd.set_detect_anomaly(value)


def _current_card() -> int | None:
    return torch.cuda.current_device() if torch.get_device_module("cuda").is_initialized() else None


def _set_card(index: int | None) -> None:
    torch.cuda.set_device(index or 0)
