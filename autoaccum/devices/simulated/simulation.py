"""PyTorch on a card that is not there: CUDA tensors are fake, everything on the CPU stays real (facts 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.recorder import Recorder

DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")
_DEVICE_QUERY = torch.ops.prim.device.default


class CardMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operators on CUDA tensors without values, and shows their storages to a recorder."""

    avoid_device_init = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.recorder = recorder
        self._depth = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs["device"] = DEVICE
        self._depth += 1
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.recorder.see(out)
        return out


@contextmanager
def simulate(card: Card, recorder: Recorder | None = None) -> Iterator[CardMode]:
    """Have PyTorch believe in `card`; meant for a process of its own, and undone at the end all the same."""
    with ExitStack() as stack:
        mode = CardMode(recorder or Recorder())
        dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__

        def answer(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return _META if func is _DEVICE_QUERY else dispatch(cls, func, types, args, kwargs or {})

        stack.enter_context(replaced(FakeTensor, "__torch_dispatch__", classmethod(answer)))
        handlers = fake_tensor._DISPATCH_META_HANDLERS
        before = handlers[_DEVICE_QUERY]
        handlers[_DEVICE_QUERY] = lambda args: _META
        stack.callback(handlers.__setitem__, _DEVICE_QUERY, before)
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(replaced(torch.Tensor, "to", _to))
        stack.enter_context(replaced(torch.Tensor, "cuda", lambda tensor, *_, **__: _to(tensor, DEVICE)))
        stack.enter_context(mode)
        yield mode


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`, the card named by its index: a CPU build asks the driver which one `cuda` means."""
    args = tuple(_indexed(arg) for arg in args)
    kwargs = {name: _indexed(value) for name, value in kwargs.items()}
    return torch._C.TensorBase.to(tensor, *args, **kwargs)


def _indexed(value: Any) -> Any:
    if isinstance(value, str) and not value.startswith("cuda"):
        return value
    if isinstance(value, str | torch.device):
        device = torch.device(value)
        return DEVICE if device.type == "cuda" and device.index is None else device
    return value


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have `owner` carry `value` under `name`, and what it had before at the end."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
