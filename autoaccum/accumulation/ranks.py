"""Training over several ranks, which is not built yet: refused, since by itself it goes wrong in silence.

Ranks with unequal samples would wait for each other for ever, those with unequal weights average wrongly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoaccum.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
_NOT_YET = "several ranks are not built yet"


def check_group() -> None:
    """Refuse to be one of several ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if (count := distributed.get_world_size()) > 1:
        raise UsageError(
            f"this process is one of {count} ranks, and {_NOT_YET}",
            hint="run it in one process, without torch.distributed",
        )


def check_launch() -> None:
    """Refuse to be one of several processes that a launcher has started, and one of several ranks."""
    count = os.environ.get("WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 1:
        raise UsageError(
            f"this process is one of {int(count)} (WORLD_SIZE), and {_NOT_YET}",
            hint="start it once, without torchrun; `autoaccum plan --world-size N` plans for ranks all the same",
        )
    check_group()


def check_unsharded(model: nn.Module) -> None:
    """Refuse a model that is spread over ranks, or has a module within that is, be it over one."""
    found = next(_spread(model), None)
    if found is not None:
        name, what = found
        where = f"{name} in the model" if name else "the model"
        raise UsageError(
            f"{where} is {what}, and {_NOT_YET}", hint="give the bare module, in one process: not wrapped, not sharded"
        )


def _spread(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        wrappers = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS]
        if wrappers:
            yield name, "sharded by fully_shard" if wrappers[0] == "FSDPModule" else f"a {wrappers[0]}"
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            yield name, "a DTensor"
