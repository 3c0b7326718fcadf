"""Labels for the blocks of a rehearsal: the module an operator runs for, and who holds the block."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import Category
from autoaccum.devices.simulated.trace import NO_MODULE, LabelledTrace, ModuleName, Origin, Owner, Role, Trace
from autoaccum.devices.simulated.tracing.recorder import Recorder
from autoaccum.devices.trial_run import TrialRun

_NODE_OF_LEAF = "AccumulateGrad"


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `root.named_modules()`, which would have each module hashed: that numbers it (`numbering`), in this order."""
    known: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in known:
            continue
        known.add(id(module))
        yield path, module
        inner = ((f"{path}.{name}" if path else name, each) for name, each in module._modules.items())
        waiting += reversed([(name, each) for name, each in inner if each is not None])


class ModuleTracker:
    """Follows the calls of a model's modules while it is entered (`followed`).

    Autograd numbers what forward does, and each step of a backward pass knows the number of the one it belongs to
    (`_sequence_nr` of its node; `torch.autograd._get_sequence_nr` is the next). So what is running is noted along with
    that number as modules are entered and left, and looked up in backward. What checkpointing runs again enters its
    modules anew. A module that is not the model's, such as a loss, counts as part of who calls it, and what a gradient
    of a gradient takes belongs to who asked for the first.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._indices: dict[int, int] = {}
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._stack: list[tuple[int, bool]] = []
        self._numbers: list[int] = []
        self._running: list[int] = []
        self.names: list[ModuleName] = [NO_MODULE]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all modules of this process."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def now(self) -> tuple[int, Role]:
        """The index of the module an operator runs for at this moment, and what its memory comes to be by."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return (self._stack[-1][0] if self._stack else 0), "plain"
        if type(node).__name__ == _NODE_OF_LEAF:
            return self.owner_of(node.variable), "summed"
        if self._stack and self._stack[-1][1]:
            return self._stack[-1][0], "recomputed"
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._running[index] if index >= 0 else 0), "recomputed" if torch.is_grad_enabled() else "plain"

    def owner_of(self, tensor: torch.Tensor) -> int:
        """The index of the module whose own parameter or buffer `tensor` is; 0 for none's."""
        known = self._owners.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else 0  # Another may lie where one has died.

    def modules(self) -> Iterator[tuple[nn.Module, int]]:
        """The model's modules with their indices, once it is there; each under the first of its names."""
        self._look()
        return zip(self._modules, count(1), strict=False)

    def own(self, tensor: torch.Tensor, module: int) -> None:
        """Note whose `tensor` is, unless another had it first."""
        known = self._owners.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._owners[id(tensor)] = weakref.ref(tensor), module

    def _look(self) -> None:
        model = None if self._modules else self._model()
        if model is not None:
            for path, module in walk_modules(model):
                self._indices[id(module)] = len(self.names)
                self._modules.append(module)
                self.names.append(ModuleName(path, type(module).__name__))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._look()
        outside = self._stack[-1][0] if self._stack else 0
        within_backward = torch._C._current_autograd_node() is not None
        self._stack.append((self._indices.get(id(module), outside), within_backward))
        self._note()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._running.append(self._stack[-1][0] if self._stack else 0)


_TABLES = ("_parameters", "_buffers", "_modules")


class BlockLabeller:
    """Labels the blocks of one rehearsal while it is entered (`labelling`).

    Who holds a tensor is asked whenever the phase changes, and before and after each step of an optimizer: so nothing
    is missed that lives from one to the other. A block stays with whom it was first found.

    `kept` stands for what a library keeps, `beside` are modules beside the model, such as a loss.
    """

    def __init__(
        self, recorder: Recorder, rehearsal: TrialRun, kept: Mapping[str, Tensor], beside: Iterable[nn.Module] = ()
    ) -> None:
        self._recorder, self._rehearsal, self._kept = recorder, rehearsal, kept
        self._beside = [module for root in beside for _, module in walk_modules(root)]
        self._running = ModuleTracker(lambda: None if rehearsal.made is None else rehearsal.made[0])
        self._phase: Phase | None = None
        self._origins: list[Origin] = []
        self._owners: dict[int, Owner] = {}
        self._stayed: set[int] = set()
        self._optimizers: dict[Optimizer, None] = {}

    @contextmanager
    def labelling(self) -> Iterator[None]:
        """Follow the modules and optimizers of this process."""
        before = register_optimizer_step_pre_hook(self._see_step)
        after = register_optimizer_step_post_hook(self._see_step)
        try:
            with self._running.followed():
                yield
        finally:
            before.remove()
            after.remove()

    def see(self, phase: Phase, beside_tensors: bool, dtype: torch.dtype | None) -> None:
        """Label the next block (`recorder.Witness`)."""
        if phase != self._phase:
            self._phase = phase
            self._ask_everyone()
        module, role = self._running.now()
        named = "" if dtype is None else str(dtype).removeprefix("torch.")
        self._origins.append(
            Origin(_name_of(self._recorder.op), module, "workspace" if beside_tensors else role, named)
        )

    def mark_update(self) -> None:
        """An update begins: what modules keep by now, and still do in the end, is theirs for good."""
        self._stayed = {block for block, _ in self._attributes()}

    def label(self, trace: Trace) -> LabelledTrace:
        """`trace`, which has just ended, with its labels."""
        self._ask_everyone()
        for block, module in self._attributes():
            if block in self._stayed:
                self._owners.setdefault(block, Owner("parameters", module))
        return LabelledTrace(
            trace=trace, modules=tuple(self._running.names), origins=tuple(self._origins), owners=dict(self._owners)
        )

    def _see_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[optimizer] = None  # One within another, too.
        self._ask_everyone()

    def _ask_everyone(self) -> None:
        if self._rehearsal.made is None:
            return
        self._optimizers[self._rehearsal.made[1]] = None
        self._ask_modules()
        for optimizer in self._optimizers:
            self._ask_optimizer(optimizer)
        self._claim("averages", self._rehearsal.averages)
        self._ask_loop()
        self._claim("workspace", self._kept.values())

    def _ask_modules(self) -> None:
        for module, index in self._modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._running.own(parameter, index)
                    self._claim_parameter(parameter)
            self._claim("parameters", [each for each in module._buffers.values() if each is not None], index)

    def _ask_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._claim_parameter(parameter)
        for parameter, state in optimizer.state.items():
            module = self._running.owner_of(parameter) if isinstance(parameter, Tensor) else 0
            self._claim("optimizer_state", _tensors(state), module)
        others = [value for name, value in vars(optimizer).items() if name != "state"]
        self._claim("optimizer_state", _tensors(others))

    def _ask_loop(self) -> None:
        for tensor in self._rehearsal.outputs:
            block = self._recorder.block_of(tensor)
            if block is not None:
                self._claim("outputs", [tensor], self._origins[block].module)

    def _claim_parameter(self, parameter: Tensor) -> None:
        module = self._running.owner_of(parameter)
        self._claim("parameters", [parameter], module)
        if parameter.grad is not None:
            self._claim("gradients", [parameter.grad], module)

    def _claim(self, category: Category, held: Iterable[Tensor], module: int = 0) -> None:
        for tensor in held:
            block = self._recorder.block_of(tensor)
            if block is not None:
                self._owners.setdefault(block, Owner(category, module))

    def _attributes(self) -> Iterator[tuple[int, int]]:
        """The blocks of tensors that modules keep as plain attributes, such as a table made in forward, and whose."""
        for module, index in self._modules():
            for tensor in _tensors([value for name, value in vars(module).items() if name not in _TABLES]):
                block = self._recorder.block_of(tensor)
                if block is not None:
                    yield block, index

    def _modules(self) -> Iterator[tuple[nn.Module, int]]:
        yield from self._running.modules()
        yield from ((module, 0) for module in self._beside)


@cache
def _name_of(op: Any) -> str:
    if op is None:
        return ""
    return str(op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op)


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))
