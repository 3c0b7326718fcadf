"""Labels for the blocks of a trial run: the module whose operator allocated a block, and what holds it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from autoaccum.sharded_tensors import local_part, model_class
from autoaccum.simulation.trace_records import (
    NO_MODULE,
    Category,
    LabelledTrace,
    ModuleName,
    Origin,
    Owner,
    Phase,
    Role,
    Trace,
)
from autoaccum.simulation.tracing.module_lines import find_module_lines
from autoaccum.simulation.tracing.one_rank import RankPurposes, unsharded_gradients
from autoaccum.simulation.tracing.recorder import Recorder, Watcher

_LEAF_NODE = "AccumulateGrad"
_TABLES = ("_parameters", "_buffers", "_modules")


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of `root.named_modules()` without hashing them, which would number them."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        inner = ((f"{path}.{name}" if path else name, child) for name, child in module._modules.items())
        waiting += reversed([(name, child) for name, child in inner if child is not None])


class ModuleTracker:
    """Tracks which module of its models is running, in forward and in backward, within `tracking()`.

    Autograd gives each operation of forward a sequence number, which its backward node keeps (`_sequence_nr`; the next
    number is `torch.autograd._get_sequence_nr`). The tracker records the running module and this number whenever a
    module is entered or left, and looks the number up in backward. Recomputation by checkpointing enters the modules
    again. A module outside the model, such as a loss, counts as part of its caller. Memory of a second-order gradient
    belongs to the module that requested the first-order gradient.

    Attributes:
        names: The names of the modules, by their indices.
        owners: By parameter, the index of the module that has it.
    """

    def __init__(self, models: Callable[[], Sequence[nn.Module]]) -> None:
        self._models = models
        self._firsts: list[int] = []
        self._modules: list[nn.Module] = []
        self._indices: dict[int, int] = {}
        self._stacks: WeakKeyDictionary[greenlet, list[tuple[int, bool]]] = WeakKeyDictionary()
        self._numbers: list[int] = []
        self._running: list[int] = []
        self.names: list[ModuleName] = [NO_MODULE]
        self.owners: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()

    @property
    def _stack(self) -> list[tuple[int, bool]]:
        """The modules that are running; parts that run in lock step have a stack each, as they have of Python's."""
        return self._stacks.setdefault(getcurrent(), [])

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track the calls of all modules in this process."""
        with register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True):
            yield

    def current(self) -> tuple[int, Role]:
        """Return the index of the module that is running now, and the role of blocks it allocates."""
        node: Any = torch._C._current_autograd_node()
        running, within_backward = self._stack[-1] if self._stack else (0, False)
        if node is None:
            return running, "plain"
        if type(node).__name__ == _LEAF_NODE:
            return self.owners.get(node.variable, 0), "summed"
        if within_backward:
            return running, "recomputed"
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._running[index] if index >= 0 else 0), "recomputed" if torch.is_grad_enabled() else "plain"

    def index_of(self, module: nn.Module) -> int:
        """Return the index of a module of the model; 0 for others."""
        self._find_modules()
        return self._indices.get(id(module), 0)

    def modules(self) -> Iterator[tuple[nn.Module, int]]:
        """Yield the modules of the model, once it exists, with their indices; a shared module only once."""
        self._find_modules()
        return zip(self._modules, count(1), strict=False)

    def name_modules(self) -> tuple[ModuleName, ...]:
        """Return the names of the modules by their indices; with several models, each begins with its model's class."""
        if len(self._firsts) < 2:
            return tuple(self.names)
        named = [NO_MODULE]
        for index, (path, kind) in enumerate(self.names[1:], start=1):
            model = self.names[self._firsts[bisect_right(self._firsts, index) - 1]].kind
            named.append(ModuleName(f"{model}.{path}" if path else model, kind))
        return tuple(named)

    def _find_modules(self) -> None:
        models = self._models()
        for model in models[len(self._firsts) :]:
            self._firsts.append(len(self.names))
            for path, module in walk_modules(model):
                if id(module) not in self._indices:
                    self._indices[id(module)] = len(self.names)
                    self._modules.append(module)
                    self.names.append(ModuleName(path, model_class(module).__name__))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._find_modules()
        caller = self._stack[-1][0] if self._stack else 0
        within_backward = torch._C._current_autograd_node() is not None
        self._stack.append((self._indices.get(id(module), caller), within_backward))
        self._record_running()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._stack.pop()
        self._record_running()

    def _record_running(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._running.append(self._stack[-1][0] if self._stack else 0)


class Run(Protocol):
    """A training step that runs: its models and optimizers once they are made, an EMA, and what the loop holds."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models that are made by now; more may follow."""
        ...

    @property
    def optimizers(self) -> Iterable[Optimizer]:
        """The optimizers that are made by now."""
        ...

    @property
    def averages(self) -> Iterable[Tensor]:
        """The averages of the weights."""
        ...

    @property
    def outputs(self) -> Iterable[Tensor]:
        """The outputs that are held."""
        ...


class BlockLabeller(Watcher):
    """Labels the blocks of one trial run, within `labelling()`.

    Modules, optimizers and the loop are searched for tensors whenever the phase changes, and before and after each
    optimizer step; the first holder that is found owns a block. Tensors that live only between two searches are
    not found.

    Args:
        recorder: Records the blocks of the trial run.
        trial_run: Gives the models, the optimizers, and the tensors that the loop holds.
        auxiliary_modules: Modules outside the model, such as a loss.
        allocators: As in `RankPurposes`.
    """

    def __init__(
        self,
        recorder: Recorder,
        trial_run: Run,
        auxiliary_modules: Iterable[nn.Module] = (),
        allocators: Iterable[tuple[Any, str, Category]] = (),
    ) -> None:
        self._recorder, self._trial_run = recorder, trial_run
        self._auxiliary_modules = [module for root in auxiliary_modules for _, module in walk_modules(root)]
        self._tracker = ModuleTracker(lambda: trial_run.models)
        self._phase: Phase | None = None
        self._origins: list[Origin] = []
        self._owners: dict[int, Owner] = {}
        self._ranks = RankPurposes(allocators)
        self._exchanged: dict[int, Owner] = {}
        self._kept_attributes: set[int] = set()
        self._optimizers: dict[Optimizer, None] = {}

    @contextmanager
    def labelling(self) -> Iterator[None]:
        """Track the modules and optimizers of this process."""
        before = register_optimizer_step_pre_hook(self._see_step)
        after = register_optimizer_step_post_hook(self._see_step)
        with before, after, self._tracker.tracking(), ExitStack() as stack:
            self._ranks.watch(stack)
            yield

    def label_next(self, phase: Phase, beside_tensors: bool, dtype: torch.dtype | None) -> None:
        """Label the next block."""
        if phase != self._phase:
            self._phase = phase
            self._find_owners()
        module, role = self._tracker.current()
        if self._ranks.purpose is not None:
            owner = module if self._ranks.module is None else self._tracker.index_of(self._ranks.module)
            self._exchanged[len(self._origins)] = Owner(self._ranks.purpose, owner)
        dtype_name = "" if dtype is None else str(dtype).removeprefix("torch.")
        self._origins.append(
            Origin(_name_of(self._recorder.op), module, "workspace" if beside_tensors else role, dtype_name)
        )

    def mark_update(self) -> None:
        """Mark the start of an update: attributes of modules that stay to the end count as parameters."""
        self._kept_attributes = {block for block, _ in self._attributes()}

    def label(self, trace: Trace) -> LabelledTrace:
        """Return `trace`, which has just ended, with its labels."""
        self._find_owners()
        for block, module in self._attributes():
            if block in self._kept_attributes:
                self._owners.setdefault(block, Owner("parameters", module))
        names = self._tracker.name_modules()
        return LabelledTrace(
            trace=trace,
            modules=names,
            origins=tuple(self._origins),
            owners={**self._exchanged, **self._owners},
            lines=find_module_lines((names[index].path, module) for module, index in self._tracker.modules()),
        )

    def _see_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[optimizer] = None  # Also an optimizer within another.
        self._find_owners()

    def _find_owners(self) -> None:
        if not self._trial_run.models:
            return
        self._optimizers.update(dict.fromkeys(self._trial_run.optimizers))
        self._search_modules()
        for optimizer in self._optimizers:
            self._search_optimizer(optimizer)
        self._set_owner("averages", self._trial_run.averages)
        for tensor in self._trial_run.outputs:
            block = self._recorder.block_of(tensor)
            if block is not None:
                self._set_owner("outputs", [tensor], self._origins[block].module)

    def _search_modules(self) -> None:
        for module, index in self._modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._tracker.owners.setdefault(parameter, index)
                    self._set_parameter_owner(parameter)
            self._set_owner("parameters", [buffer for buffer in module._buffers.values() if buffer is not None], index)
        for model in self._trial_run.models:
            for gradient, module in unsharded_gradients(model):
                self._set_owner("gradients", [gradient], self._tracker.index_of(module))

    def _search_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._set_parameter_owner(parameter)
        for parameter, state in optimizer.state.items():
            module = self._tracker.owners.get(parameter, 0) if isinstance(parameter, Tensor) else 0
            self._set_owner("optimizer_state", _tensors(state), module)
        others = [value for name, value in vars(optimizer).items() if name != "state"]
        self._set_owner("optimizer_state", _tensors(others))

    def _set_parameter_owner(self, parameter: Tensor) -> None:
        module = self._tracker.owners.get(parameter, 0)
        self._set_owner("parameters", [parameter], module)
        if parameter.grad is not None:
            self._set_owner("gradients", [parameter.grad], module)

    def _set_owner(self, category: Category, tensors: Iterable[Tensor], module: int = 0) -> None:
        for tensor in tensors:
            block = self._recorder.block_of(local_part(tensor))
            is_gathered = category == "parameters" and block in self._exchanged  # A module has it for a while.
            if block is not None and not is_gathered:
                self._owners.setdefault(block, Owner(category, module))

    def _attributes(self) -> Iterator[tuple[int, int]]:
        """Yield blocks of plain tensor attributes of modules, such as cached tables, with the modules' indices."""
        for module, index in self._modules():
            for tensor in _tensors([value for name, value in vars(module).items() if name not in _TABLES]):
                block = self._recorder.block_of(tensor)
                if block is not None:
                    yield block, index

    def _modules(self) -> Iterator[tuple[nn.Module, int]]:
        yield from self._tracker.modules()
        yield from ((module, 0) for module in self._auxiliary_modules)


@cache
def _name_of(op: Any) -> str:
    if op is None:
        return ""
    return str(op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op)


def _tensors(nested: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor))
