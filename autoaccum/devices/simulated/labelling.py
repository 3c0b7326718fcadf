"""Labels for the blocks of a rehearsal: where each comes from, and who holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import Category
from autoaccum.devices.rehearsal import Rehearsal
from autoaccum.devices.simulated.labels import Claim, LabelledTrace, Origin
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.running import Running, walk_modules
from autoaccum.devices.simulated.trace import Trace

_TABLES = ("_parameters", "_buffers", "_modules")


class Labeller:
    """Labels the blocks of one rehearsal while it is entered (`labelling`).

    Who holds a tensor is asked whenever the phase changes, and before and after each step of an optimizer: so nothing
    is missed that lives from one to the other. A block stays with whom it was first found.

    Args:
        recorder: Numbers the blocks.
        rehearsal: What is rehearsed.
        kept: Tensors that stand for what a library keeps.
        beside: Modules beside the model, such as a loss.
    """

    def __init__(
        self, recorder: Recorder, rehearsal: Rehearsal, kept: Mapping[str, Tensor], beside: Iterable[nn.Module] = ()
    ) -> None:
        self._recorder, self._rehearsal, self._kept = recorder, rehearsal, kept
        self._beside = [module for root in beside for _, module in walk_modules(root)]
        self._running = Running(lambda: None if rehearsal.made is None else rehearsal.made[0])
        self._phase: Phase | None = None
        self._ops: dict[Any, str] = {None: ""}
        self._origins: list[Origin] = []
        self._claims: dict[int, Claim] = {}
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
        self._origins.append(Origin(self._op(), module, "workspace" if beside_tensors else role, named))

    def mark_update(self) -> None:
        """An update begins: what modules keep by now, and still do in the end, is theirs for good."""
        self._stayed = {block for block, _ in self._attributes()}

    def label(self, trace: Trace) -> LabelledTrace:
        """`trace`, which has just ended, with its labels."""
        self._ask_everyone()
        for block, module in self._attributes():
            if block in self._stayed:
                self._claims.setdefault(block, Claim("parameters", module))
        return LabelledTrace(
            trace=trace, modules=tuple(self._running.names), origins=tuple(self._origins), claims=dict(self._claims)
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
                self._claims.setdefault(block, Claim(category, module))

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

    def _op(self) -> str:
        op = self._recorder.op
        name = self._ops.get(op)
        if name is None:
            name = self._ops[op] = str(op.overloadpacket) if isinstance(op, torch._ops.OpOverload) else str(op)
        return name


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))
