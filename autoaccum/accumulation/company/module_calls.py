"""The module calls of one run, followed by hooks: which module, for which time, called by which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autoaccum.workload import nests


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        name: The module's name in the model; empty for the model itself.
        count: Its calls before this one in the run.
        caller: The call it was made within; None: the loss called it.
    """

    name: str
    count: int
    caller: Call | None = field(default=None, compare=False, repr=False)

    @property
    def depth(self) -> int:
        """How many calls it was made within."""
        return 0 if self.caller is None else self.caller.depth + 1

    @property
    def callers(self) -> Iterator[Call]:
        """Those calls, the innermost first."""
        if self.caller is not None:
            yield self.caller
            yield from self.caller.callers


class Follower(Protocol):
    """Is shown every call, and may exchange what goes in and what comes out."""

    def entered(self, call: Call, arguments: Any) -> Any:
        """What the module is to be given in place of `arguments`: a pair of a tuple and a dict."""

    def left(self, call: Call, output: Any) -> Any:
        """What the caller is to get in place of `output`."""


@contextmanager
def following(
    model: nn.Module, follower: Follower, beside: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[None]:
    """Show `follower` all calls of modules of `model`, and of those `beside` it by name; no hook is left behind."""
    stack: list[Call] = []
    counts = Counter[str]()

    def entering(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            stack.append(Call(name, counts[name], stack[-1] if stack else None))
            counts[name] += 1
            return follower.entered(stack[-1], (args, kwargs))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return follower.left(stack.pop(), output)

    with ExitStack() as hooks:
        roots = {"": model, **beside}.items()
        for name, module in chain.from_iterable(root.named_modules(prefix=prefix) for prefix, root in roots):
            hooks.callback(module.register_forward_pre_hook(entering(name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        yield


class Recorder:
    """Keeps copies of what went into and came out of every call.

    Attributes:
        inputs: The floating tensors of its arguments, by call.
        outputs: Those of its output; a call that did not end has none.
    """

    def __init__(self) -> None:
        self.inputs: dict[Call, list[Tensor]] = {}
        self.outputs: dict[Call, list[Tensor]] = {}

    def entered(self, call: Call, arguments: Any) -> Any:
        """Copy the arguments."""
        self.inputs[call] = [tensor.detach().clone() for tensor in floating(arguments)]
        return arguments

    def left(self, call: Call, output: Any) -> Any:
        """Copy the output."""
        self.outputs[call] = [tensor.detach().clone() for tensor in floating(output)]
        return output

    def counts(self) -> Counter[str]:
        """How often each module was called."""
        return Counter(call.name for call in self.inputs)


class Measurer:
    """Keeps the shapes of what a `Recorder` copies.

    Attributes:
        inputs: The shapes of the floating tensors of its arguments, by call.
        outputs: Those of its output.
    """

    def __init__(self) -> None:
        self.inputs: dict[Call, list[tuple[int, ...]]] = {}
        self.outputs: dict[Call, list[tuple[int, ...]]] = {}

    def entered(self, call: Call, arguments: Any) -> Any:
        """Measure the arguments."""
        self.inputs[call] = [tuple(tensor.shape) for tensor in floating(arguments)]
        return arguments

    def left(self, call: Call, output: Any) -> Any:
        """Measure the output."""
        self.outputs[call] = [tuple(tensor.shape) for tensor in floating(output)]
        return output


def standing_in(values: Tensor) -> Tensor:
    """A copy of `values`; a leaf that requires a gradient where gradients are recorded, as a loss is to have one."""
    return values.clone().requires_grad_(torch.is_grad_enabled())


def floating(nest: Any) -> list[Tensor]:
    """The dense floating tensors of a nest, in order; what cannot be looked into (a PackedSequence) has none."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    exchange(nest, keep)
    return found


def exchange(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nest with each of its `floating` tensors changed; itself where none was."""
    if isinstance(node, Tensor):
        dense = node.is_floating_point() and not node.is_nested and not node.is_sparse and not node.is_sparse_csr
        return change(node) if dense else node
    children = nests.children(node)
    if children is None:
        return node
    changed = [exchange(child, change) for _, child in children]
    if all(new is old for new, (_, old) in zip(changed, children, strict=True)):
        return node
    return nests.rebuild(node, changed)
