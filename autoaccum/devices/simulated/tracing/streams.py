"""Streams and events of the simulated card: all work is done at once, but each block belongs to the current stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, ClassVar

import torch

from autoaccum.devices.simulated.tracing.recorder import Recorder

_CARD = torch.device("cuda", 0)


class Event:
    """An event, which has already happened."""

    device = _CARD

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return 0: no time passes."""
        return 0.0

    def wait(self, *_: Any) -> None:
        """Do nothing, since all work is done."""

    synchronize = record = wait


class Stream:
    """A stream, current within `with`."""

    device, device_index, device_type, priority = _CARD, 0, 1, 0
    recorder: ClassVar[Recorder]
    current: ClassVar[Stream]
    _numbers: ClassVar[count[int]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = self.cuda_stream = next(self._numbers)
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(self.current)
        self.make_current()
        return self

    def __exit__(self, *_: object) -> None:
        self._before.pop().make_current()

    def make_current(self) -> None:
        """Make this the stream that tensors are allocated on."""
        type(self).current = self
        self.recorder.stream = self.stream_id

    def is_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return `event`, or a new one."""
        return event or Event()

    def wait(self, *_: Any) -> None:
        """Do nothing, since all work is done."""

    wait_stream = wait_event = synchronize = wait


def stream_answers(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Return the functions and classes of `torch.cuda` for streams and events, by name."""

    class CudaStream(Stream):
        """`torch.cuda.Stream`."""

    CudaStream.__name__ = CudaStream.__qualname__ = "Stream"
    CudaStream.recorder, CudaStream._numbers = recorder, count()
    CudaStream.current = default = CudaStream()

    def using(stream: Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            stream.make_current()

    return {
        **dict.fromkeys(("Stream", "ExternalStream", "get_stream_from_external"), CudaStream),
        "Event": Event,
        "current_stream": lambda *_, **__: CudaStream.current,
        "default_stream": lambda *_, **__: default,
        "set_stream": set_stream,
        "stream": using,
    }
