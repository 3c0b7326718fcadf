"""`torch.load` in a simulation: values come from the file as always, and what belongs on the card is put there.

Left alone, it would see FakeTensorMode and make tensors without values, on whatever device they were saved from, that
live for good.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autoaccum.devices.simulated.impersonation import DEVICE, check_index
from autoaccum.devices.simulated.patches import replaced

_RESTORE: Any = torch.serialization.default_restore_location
_ZIP = b"PK\x03\x04"


def read_checkpoints(stack: ExitStack) -> None:
    """Exchange `torch.load` until `stack` is closed."""
    load = partial(_load, torch.load)
    for owner in (torch, torch.serialization):
        stack.enter_context(replaced(owner, "load", load))


def _load(native: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
    places = _Places(map_location)
    if options.get("mmap") is None and _can_be_mapped(f):
        options["mmap"] = True  # What is never read takes no memory.
    onto_card = replaced(torch.UntypedStorage, "cuda", lambda storage, *args, **_: places.put_on_card(storage, *args))
    with _disable_current_modes(), onto_card:
        loaded = native(f, places.choose, *args, **options)
    return tree_map(places.move, loaded) if places.on_card else loaded


def _can_be_mapped(f: Any) -> bool:
    if not isinstance(f, str | os.PathLike) or not Path(f).is_file():
        return False
    with Path(f).open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


class _Places:
    """Where `map_location` wants each storage of a file.

    Attributes:
        on_card: Those that belong on the card, by their address; they are on the host as yet.
    """

    def __init__(self, map_location: Any) -> None:
        self._map_location = map_location
        self._moved: dict[Any, Tensor] = {}
        self.on_card: dict[int, torch.UntypedStorage] = {}

    def choose(self, storage: torch.UntypedStorage, location: str) -> Any:
        """As `_get_restore_location` in `torch/serialization.py`."""
        wanted = self._map_location
        if isinstance(wanted, dict):
            location = wanted.get(location, location)
        elif callable(wanted):
            placed = wanted(storage, location)
            if placed is not None:
                return placed
        elif wanted is not None:
            location = wanted.decode() if isinstance(wanted, bytes) else str(wanted)
        if location.startswith("cuda"):
            return self.put_on_card(storage, location)
        return _RESTORE(storage, location)

    def put_on_card(self, storage: torch.UntypedStorage, device: Any = None, *_: Any) -> Any:
        """Note that `storage` goes there."""
        check_index(device)
        self.on_card[storage._cdata] = storage
        return storage

    def move(self, value: Any) -> Any:
        """`value` on the card, if it is a tensor or a module that belongs there."""
        if isinstance(value, nn.Module):
            return value._apply(self.move)  # type: ignore[no-untyped-call]
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()._cdata
        if storage not in self.on_card:
            return value
        key = storage, value.storage_offset(), value.shape, value.stride()
        if key not in self._moved:
            moved = value.detach().to(DEVICE)
            self._moved[key] = nn.Parameter(moved, value.requires_grad) if isinstance(value, nn.Parameter) else moved
        return self._moved[key]
