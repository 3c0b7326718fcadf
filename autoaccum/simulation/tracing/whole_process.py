"""What a simulation needs that lasts for the life of a process: checkpoints that are written, and worker processes."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.recorder import manual_garbage_collection


def prepare_process(mode: FakeCudaMode, stack: ExitStack) -> None:
    """Prepare this process for a script that runs to its end on the card of `mode`.

    Two runs of a script record equal traces: random numbers are the same, and garbage is collected only on request.
    Tensors of the card are written to files as zeros. Daemonic worker processes, which prepare data, leave the
    simulation by closing `stack`.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()
    stack.enter_context(manual_garbage_collection())
    stack.callback(gc.unfreeze)
    patch(stack, FakeTensor, "__reduce_ex__", _reducing(FakeTensor.__reduce_ex__))
    with suppress(ImportError):
        safetensors: Any = import_module("safetensors.torch")
        for name in ("save", "save_file"):
            patch(stack, safetensors, name, _saving_nothing(getattr(safetensors, name)))
    run: Any = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def run_process(process: Any, *args: Any, **kwargs: Any) -> Any:
        if process.daemon:
            stack.close()
        return run(process, *args, **kwargs)

    patch(stack, BaseProcess, "_bootstrap", run_process)


def _reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return `__reduce_ex__` of a tensor of the card, as which zeros in a single element of memory are pickled."""

    def run(tensor: FakeTensor, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "copy":
            return reduce(tensor, protocol)
        with _disable_current_modes():
            zeros: Any = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            return zeros.__reduce_ex__(protocol)

    return run


def _saving_nothing(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of safetensors that writes tensors of the card without their elements."""

    def run(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            real = {
                name: torch.zeros(0, dtype=tensor.dtype) if isinstance(tensor, FakeTensor) else tensor
                for name, tensor in tensors.items()
            }
            return save(real, *args, **kwargs)

    return run
