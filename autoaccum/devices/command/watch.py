"""Watches a training script from inside of its process: its updates, its memory, and what it does with its batches.

`start` is called when the script has imported PyTorch. Everything is seen through hooks that PyTorch has, or around
functions that every training calls: `Optimizer.step`, `torch.autograd.backward`, `nn.Module.__call__`. After the last
update the process reports, and waits to be ended.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.devices.child.failures import describe_failure
from autoaccum.devices.command.script_files import protect
from autoaccum.devices.command.settings import SETTINGS, ProcessReport, WatchSettings, read_settings, write_record
from autoaccum.devices.measured_run import count_updates, skips_step
from autoaccum.errors import NotMeasuredError

if TYPE_CHECKING:
    from autoaccum.devices.command.gradient_watch import GradientWatch
    from autoaccum.devices.command.on_card import CardWatch
    from autoaccum.devices.meters import Meter

_NO_LIMIT: Final = 1 << 62
_PATIENCE: Final = 10
"""After this many times the backward passes of an update, a script has to have made its optimizer."""
_Module: Any = nn.Module
_Autocast: Any = torch.autocast
_cuda: Any = torch.cuda
_Shapes: TypeAlias = tuple[tuple[int, ...], ...]
_IMPORT: Final = "<frozen importlib._bootstrap>"


def start() -> None:
    """Watch this process, as the settings in the environment say."""
    settings = read_settings(os.environ[SETTINGS])
    protect(settings.files)
    Watch(settings).begin()


class Watch:
    """Counts, measures and reports what this process does; a copy by `os.fork` does not count.

    Args:
        settings: What to do.
    """

    def __init__(self, settings: WatchSettings) -> None:
        self._settings, self._pid, self._began = settings, os.getpid(), time.monotonic()
        self._steps: Counter[int] = Counter()
        self._updates = self._backwards = 0
        self._rank, self._ranks = (int(os.environ.get(name, at)) for name, at in (("RANK", 0), ("WORLD_SIZE", 1)))
        self._backwards_of: list[int] = []
        self._calls: list[_Shapes] = []
        self._first_call: _Shapes = ()
        self._later_calls: tuple[_Shapes, ...] = ()
        self._models: dict[int, nn.Module] = {}
        self._optimizer = ""
        self._precision: Any = "fp32"
        self._meter: Meter | None = None
        self._available: dict[str, Any] = {}
        self._limits = ExitStack()
        self._card: CardWatch | None = None
        self._gradients: GradientWatch | None = None
        self._reported = self._is_starting = self._ran_out_of_memory = False

    def begin(self) -> None:
        """Set the hooks, and enter the simulated card."""
        settings = self._settings
        self._note_updates()
        if settings.card is not None:
            from autoaccum.devices.command.on_card import CardWatch, is_other_rank

            if is_other_rank():
                self._wait_to_be_ended()
            self._card = CardWatch(settings)
        if settings.compares:
            from autoaccum.devices.command.gradient_watch import GradientWatch

            self._gradients = GradientWatch(settings, self._models)
        register_optimizer_step_post_hook(self._after_step)
        self._count_backwards()
        self._see_calls()
        self._see_autocast()
        if settings.device is not None:
            self._measure_from_first_module()
        sys.excepthook = self._excepthook
        atexit.register(self._at_exit)

    @property
    def _is_here(self) -> bool:
        return os.getpid() == self._pid and not self._is_starting

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count a step of an optimizer; an update has ended when all optimizers have made it."""
        if not self._is_here or self._reported or (self._card is None and skips_step(optimizer)):
            return
        self._optimizer = self._optimizer or type(optimizer).__name__
        self._steps[id(optimizer)] += 1
        if self._gradients is not None and not self._gradients.is_complete:
            return
        updates = count_updates(self._steps)
        if updates <= self._updates:
            return
        self._updates = updates
        self._note_updates()
        self._backwards_of.append(self._backwards)
        self._later_calls = (*(self._later_calls if updates > 2 else ()), *self._calls)
        self._calls, self._backwards = [], 0
        if updates < self._settings.updates:
            if self._card is not None:
                self._card.mark_update()
            elif self._meter is not None:
                self._meter.begin_update()
            return
        self._report()
        self._wait_to_be_ended()

    def _note_updates(self) -> None:
        """Write the number of updates where it is found if the script hangs, and take the ranks that it has joined."""
        self._settings.reports.mkdir(exist_ok=True)
        Path(self._settings.reports, f"{self._pid}.updates").write_text(str(self._updates))
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            self._rank, self._ranks = dist.get_rank(), max(self._ranks, dist.get_world_size())

    def _count_backwards(self) -> None:
        run, inside = torch.autograd.backward, False

        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # Of checkpointing, within another.
                return run(*args, **kwargs)
            inside = True
            self._backwards += self._is_here
            if self._is_here and not self._updates and self._backwards == _PATIENCE * len(self._settings.parts):
                self._look_for_optimizer()
            self._note_first_batch()
            if self._settings.device is not None and self._meter is None and self._is_here:
                self._start_meter()  # All modules were made in an import.
            try:
                compared = nullcontext() if self._gradients is None else self._gradients.one_backward()
                with self._seeing_oom(), compared:
                    return run(*args, **kwargs)
            finally:
                inside = False

        torch.autograd.backward = backward

    def _look_for_optimizer(self) -> None:
        """End a script that changes its weights by itself, of which no update would be seen."""
        if not any(issubclass(type(each), torch.optim.Optimizer) for each in gc.get_objects()):
            seen = f"the script made {self._backwards} backward passes without an optimizer"
            hint = "let it update its weights by an optimizer of torch.optim, whose steps are counted"
            self._report(NotMeasuredError(seen, hint=hint))
            self._wait_to_be_ended()

    def _see_calls(self) -> None:
        """See what the outermost modules are called with; within a call, PyTorch is as it was.

        `torch.compile` knows `nn.Module.__call__`, and would not know another.
        """
        run = _Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _Module.__call__ = run
            try:
                if self._is_here and not self._reported:
                    self._see_call(module, (args, kwargs))
                with self._seeing_oom():
                    return run(module, *args, **kwargs)
            finally:
                _Module.__call__ = call
                if self._gradients is not None:
                    self._gradients.end_call()

        _Module.__call__ = call

    @contextmanager
    def _seeing_oom(self) -> Iterator[None]:
        """Note that memory has run out within, whether the script catches that or not."""
        try:
            yield
        except Exception as error:
            if find_out_of_memory(error) is not None:
                self._ran_out_of_memory = True
                self._note_first_batch()
            raise

    def _note_first_batch(self) -> None:
        """Take the last call before the first backward pass for that with the first batch.

        Earlier ones may be of other inputs: detectors find out by a call with zeros how far they scale images down.
        """
        if self._is_here and not self._first_call:
            self._first_call = next((shapes for shapes in reversed(self._calls) if any(shapes)), ())

    def _see_call(self, module: nn.Module, inputs: Any) -> None:
        if next(module.parameters(), None) is None:  # A transform of a sample, or a criterion.
            return
        self._models.setdefault(id(module), module)
        if self._gradients is not None:
            self._gradients.see_call(inputs)
        if torch.is_grad_enabled():
            leaves = tree_leaves(inputs)
            shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._calls.append(shapes)

    def _see_autocast(self) -> None:
        enter = _Autocast.__enter__

        def enter_and_see(context: Any) -> Any:
            if self._settings.compares:
                context._enabled = False
            if self._is_here and context._enabled and context.fast_dtype in _PRECISIONS:
                self._precision = _PRECISIONS[context.fast_dtype]
            return enter(context)

        _Autocast.__enter__ = enter_and_see

    def _measure_from_first_module(self) -> None:
        """Measure from the first module on that is made outside of an import, which is taken for the model's start.

        What the script has imported and read before is held whatever the batch is, and a workload's imports do not
        count either (`devices.cpu`).
        """
        init = _Module.__init__

        def init_and_measure(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self._is_here and not _is_importing():
                _Module.__init__ = init
                self._start_meter()
            init(module, *args, **kwargs)

        _Module.__init__ = init_and_measure

    def _start_meter(self) -> None:
        from autoaccum.devices.meters import make_meter, warm_up

        device = self._settings.device or "cpu"
        if device != "cpu":  # The first of the visible cards, or that of the rank.
            local = _cuda.current_device() if _cuda.is_initialized() else os.environ.get("LOCAL_RANK", 0)
            device = f"cuda:{local}"
        meter = make_meter(device)
        self._is_starting = True
        # The script may make its model on `meta`, or without gradients.
        with torch.random.fork_rng(), torch.device(meter.device), torch.enable_grad():
            meter.open()
            warm_up(meter.device)
        self._is_starting = False
        self._available = dict(meter.begin())
        meter.start()
        self._limits.enter_context(meter.limit(self._limit_bytes))
        self._meter = meter

    @property
    def _limit_bytes(self) -> int:
        return self._settings.limit_bytes or _NO_LIMIT

    def _excepthook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Report what ended the script, and show it as Python does."""
        self._limits.close()
        if self._is_here and not issubclass(kind, KeyboardInterrupt):
            with suppress(Exception):
                self._report(error)
        sys.__excepthook__(kind, error, traceback)

    def _at_exit(self) -> None:
        """Report of a script that has ended before its last update."""
        if self._is_here:
            self._report()

    def _report(self, error: BaseException | None = None) -> None:
        if self._reported:
            return
        self._reported = True
        self._limits.close()
        if error is None and self._settings.paths is not None:
            try:
                self._settings.paths.check_loaded(None)
            except NotMeasuredError as astray:
                error = astray
        report = ProcessReport(
            pid=self._pid,
            rank=self._rank,
            world_size=self._ranks,
            updates=self._updates,
            backwards=tuple(self._backwards_of) if self._updates else (self._backwards,),
            first_batch=self._first_call,
            batches=self._later_calls or tuple(self._calls),
            caught_oom=self._ran_out_of_memory,
            optimizer=self._optimizer,
            precision=self._precision,
            available=self._available,
            **self._measured(),
            **self._describe_model(),
            failure=None if error is None else self._describe(error),
            simulated=None if self._card is None or error is not None else self._card.result(),
            seconds=time.monotonic() - self._began,
        )
        if self._gradients is not None and self._rank == 0:
            self._gradients.save()
        write_record(self._settings.reports / f"{self._pid}.json", report)

    def _measured(self) -> dict[str, Any]:
        from autoaccum.devices.inspection import describe_environment

        device = torch.device("cpu") if self._meter is None else self._meter.device
        fields: dict[str, Any] = {"environment": describe_environment(device)}
        if self._meter is None:
            return fields
        trial = self._meter.record(self._settings.parts, self._limit_bytes)
        names = ("outcome", "message", "peak_reserved_bytes", "peak_allocated_bytes", "allocator_retries")
        fields |= {name: getattr(trial, name) for name in names}
        return fields

    def _largest_model(self) -> nn.Module | None:
        """Return the largest of the modules that the script calls, without a wrapper for ranks or a compiler."""
        models = list(self._models.values())
        if not models:
            return None
        model = max(models, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))
        for name in ("_orig_mod", "module"):
            inner = getattr(model, name, None)
            model = inner if isinstance(inner, nn.Module) and len(list(model.children())) == 1 else model
        return model

    def _describe_model(self) -> dict[str, Any]:
        from autoaccum.accumulation.argument_checks import storage_bytes
        from autoaccum.accumulation.batchnorm import batchnorm_names
        from autoaccum.devices.inspection import name_dtype
        from autoaccum.sharded_tensors import model_class

        model = self._largest_model()
        if model is None:
            return {}
        parameters = list(model.parameters())
        return {
            "model": model_class(model).__name__,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "parameter_bytes": storage_bytes(parameters),
            "dtypes": tuple(dict.fromkeys(name_dtype(parameter.dtype) for parameter in parameters)),
            "batchnorms": tuple(batchnorm_names(model)),
        }

    def _describe(self, error: BaseException) -> Any:
        from autoaccum.simulation.unsupported import as_workload_error

        doing = f"micro-batch {self._settings.micro_batch}"
        if self._card is not None:
            error = as_workload_error(error, doing) or error
        return describe_failure(error, doing)

    def _wait_to_be_ended(self) -> None:
        """Wait for the end of the process group, which the supervisor brings; leave if that has gone."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        while Path(self._settings.folder).exists():
            time.sleep(0.1)
        os._exit(0)


_PRECISIONS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _is_importing() -> bool:
    """Return whether the caller runs within an import."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
