"""A training command on a simulated card: in its process, from the import of PyTorch to its last update."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoaccum.devices.command.settings import SimulatedRun, WatchSettings
from autoaccum.messages import message
from autoaccum.simulation.cards import CardInUse
from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.trace_records import Phase
from autoaccum.simulation.tracing import script_ranks
from autoaccum.simulation.tracing.cost_counter import CostCounter
from autoaccum.simulation.tracing.deferred_compiler import defer_compiler
from autoaccum.simulation.tracing.labelling import BlockLabeller
from autoaccum.simulation.tracing.placeholders import answer_reads
from autoaccum.simulation.tracing.placement import follow_parameters
from autoaccum.simulation.tracing.recorder import Watcher
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.simulation.tracing.whole_process import prepare_process


def is_other_rank() -> bool:
    """Return whether a launcher started this process as another rank than the first, which alone is simulated."""
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK"))


class ScriptPhases:
    """Tells the phases of a script by what it calls, within `tracking()`.

    The calls that are running say the phase: of modules, `torch.autograd.backward`, the clipping of gradients, and an
    optimizer's step. Between them it is `model` until weights are first used, then `forward` after such a call, and
    `batch` after a backward pass or an update.

    Attributes:
        models: The modules with parameters that the script called itself, without DDP around them.
        optimizers: The optimizers that made a step.
        stepped: Whether an optimizer made a step since this was last set.
        averages, outputs: Empty: nothing tells a script's averages from its other tensors.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: dict[Optimizer, None] = {}
        self.stepped = False
        self.averages: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self._made_optimizers: WeakSet[Optimizer] = WeakSet()
        self._running: list[tuple[Phase | None, bool]] = []
        self._between: Phase = "model"

    def phase(self) -> Phase:
        """Return the phase."""
        return (self._running[-1][0] if self._running else None) or self._between

    def refuses_reads(self) -> bool:
        """Return whether what runs may decide by a value what it allocates; what has no weights only reports."""
        return bool(self._running) and self._running[-1][1]

    def track(self, stack: ExitStack) -> None:
        """Follow what the script calls, until `stack` is closed."""
        for hook in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ):
            stack.callback(hook.remove)
        clips = [(owner, name) for name in ("clip_grad_norm_", "clip_grad_value_") for owner in (nn.utils, clip_grad)]
        for owner, name in (*clips, (torch.amp.GradScaler, "unscale_")):
            patch(stack, owner, name, self._within("clip", getattr(owner, name)))
        patch(stack, torch.autograd, "backward", self._within("backward", torch.autograd.backward))
        patch(stack, Optimizer, "add_param_group", self._noting(Optimizer.add_param_group))

    def _noting(self, add_param_group: Callable[..., None]) -> Callable[..., None]:
        def add_and_note(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            add_param_group(optimizer, param_group)
            self._made_optimizers.add(optimizer)

        return add_and_note

    def _within(self, phase: Phase | None, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if phase == "backward":
                for optimizer in self._made_optimizers:  # Some are made before the model is moved to the card.
                    follow_parameters(optimizer)
            self._running.append((phase, phase == "backward"))
            try:
                return function(*args, **kwargs)
            finally:
                self._running.pop()
                if phase == "backward" and not self._running:
                    self._between = "batch"

        return run

    def _enter(self, module: nn.Module, _: Any) -> None:
        phase, refuses = self._running[-1] if self._running else (None, False)
        if phase in (None, "update"):
            has_weights, with_grad = next(module.parameters(), None) is not None, torch.is_grad_enabled()
            phase = "forward" if module.training or with_grad else "evaluation"
            refuses = has_weights or with_grad
            if has_weights:
                self._between = "forward" if phase == "forward" else self._between
                self._add_model(module)
        self._running.append((phase, refuses))

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _add_model(self, module: nn.Module) -> None:
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        model = module.module if isinstance(module, wrappers) else module
        if all(model is not other for other in self.models):
            self.models.append(model)

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step; a closure, by which the optimizer runs the script's forward and backward, is no part of it."""
        self.optimizers[optimizer] = None
        self._running.append(("update", True))
        args = tuple(self._within(None, arg) if callable(arg) else arg for arg in args)
        return args, {name: self._within(None, arg) if callable(arg) else arg for name, arg in kwargs.items()}

    def _end_step(self, *_: Any) -> None:
        self._running.pop()
        self._between = "forward" if self._running else "batch"
        self.stepped = True


class CardWatch:
    """Simulates `settings.card` for the life of this process, and records what the script allocates there.

    It is made as soon as PyTorch is imported: libraries that follow see the card.

    Raises:
        UsageError: This version of PyTorch cannot be simulated.
    """

    def __init__(self, settings: WatchSettings) -> None:
        assert settings.card is not None
        self._settings, self._in_use = settings, CardInUse(settings.card, settings.others)
        self._stack, self._phases = ExitStack(), ScriptPhases()
        defer_compiler()
        self._mode = self._stack.enter_context(simulate(self._in_use, torch_version=settings.torch_version))
        self._mode.values.computed = settings.values == "cpu"
        self._phases.track(self._stack)
        answer_reads(self._mode, self._phases.refuses_reads, self._stack)
        script_ranks.simulate_script_ranks(settings.world_size, self._mode, self._stack)
        prepare_process(self._mode, self._stack)
        self._labeller: BlockLabeller | None = None
        self._counter: CostCounter | None = None
        watcher = Watcher()
        if settings.purpose == "label":
            found = self._mode.recorder, self._phases
            watcher = self._labeller = BlockLabeller(*found, allocators=script_ranks.ALLOCATORS)
            self._stack.enter_context(self._labeller.labelling())
        elif settings.purpose == "cost":
            watcher = self._counter = self._stack.enter_context(CostCounter(self._mode.recorder))
            self._counter.mark_update()  # So that the second update counts as well, should it be the last.
        self._marks = [0]
        self._mode.numbering.restart()
        self._mode.values.restart()
        self._mode.recorder.begin(self._phases.phase, watcher)
        atexit.register(self._stack.close)

    def mark_update(self) -> None:
        """Mark the end of an update, after which another one starts."""
        gc.collect()
        self._phases.stepped = False
        self._mode.recorder.mark_update()
        self._marks.append(self._mode.recorder.last_update)

    def result(self) -> SimulatedRun:
        """Return what was recorded, with the last update that the script made as that of the trace; it ends here."""
        settings, mode = self._settings, self._mode
        trace = mode.recorder.trace(settings.parts)
        is_complete = self._phases.stepped or len(self._marks) < 2
        last_update = self._marks[-1 if is_complete else -2]
        batch = settings.micro_batch if mode.values.computed else 0
        trace = replace(trace, last_update=last_update, batch=batch)
        assumed = [message("values_assumed", places=list(mode.assumed))] if mode.assumed else []
        return SimulatedRun(
            trace=trace,
            labelled=None if self._labeller is None else self._labeller.label(trace),
            cost=None if self._counter is None else self._counter.cost(settings.parts),
            alike=tuple(card.name for card in self._in_use.alike),
            notices=tuple(mode.notices),
            notes=(*assumed, *mode.checks),
        )
