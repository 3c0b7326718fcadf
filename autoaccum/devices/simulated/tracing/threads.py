"""Threads that the workload starts while a card is simulated: they are on the card, too, one operator at a time.

PyTorch's modes belong to a thread. On a real card, the allocations of threads come in any order. Here, whoever starts a
thread or gives work to a pool waits for it a little, so that the order is nearly always the same.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, thread, wait
from contextlib import ExitStack
from typing import Any

from autoaccum.devices.simulated.torch_patches import patched
from autoaccum.devices.simulated.tracing.dispatch_mode import FakeCudaMode

_WAIT_SECONDS = 1.0
"""Long enough to load a tensor; work that waits for its caller goes on afterwards."""
_Thread: Any = threading.Thread


def follow_threads(mode: FakeCudaMode, stack: ExitStack) -> None:
    """Enter `mode` in each thread that starts until `stack` is closed."""
    start, run, submit = _Thread.start, _Thread._bootstrap_inner, ThreadPoolExecutor.submit

    def start_and_wait(starting: Any) -> None:
        start(starting)
        if not starting.daemon and getattr(starting, "_target", None) is not thread._worker:
            starting.join(_WAIT_SECONDS)

    def run_on_card(running: Any) -> None:
        with mode:
            run(running)

    def submit_and_wait(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = submit(pool, function, *args, **kwargs)
        wait([future], _WAIT_SECONDS)
        return future

    stack.enter_context(patched(_Thread, "start", start_and_wait))
    stack.enter_context(patched(_Thread, "_bootstrap_inner", run_on_card))
    stack.enter_context(patched(ThreadPoolExecutor, "submit", submit_and_wait))
