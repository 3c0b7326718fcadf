"""Find losses and buffers that accumulation changes, at the first step that has several parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.accumulation.coupling import list_names
from autoaccum.accumulation.step_result import warn_caller
from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size
from autoaccum.workload.objective import AS_ONE_MODULE
from autoaccum.workload.pytree import tensors

if TYPE_CHECKING:
    from autoaccum.accumulation.backpropagation import Backpropagation

_NODES, _LEAST, _VIEWS = 200, 5, 4
"""Limits of the search for a table: autograd nodes from the loss on (behind them is the model), samples (a smaller
number is too often the size of something else), and views of each sample."""


def compares_samples(loss: Tensor, model: nn.Module, part: Any) -> bool:
    """Return whether `loss` is computed from a table of samples by samples of `part`, or of views of them.

    Only the shapes in the autograd graph are read. A square table does not count if its size is also that of a
    parameter's dimension or of another dimension of the batch.
    """
    samples = batch_size(part)
    if samples < _LEAST:
        return False
    other_sizes = {size for parameter in model.parameters() for size in parameter.shape}
    other_sizes |= {size for leaf in tensors(part) for size in leaf.shape[1:]}
    squares = {(samples * views,) * 2 for views in range(1, _VIEWS + 1) if samples * views not in other_sizes}
    queue, seen = deque([loss.grad_fn]), set[Any]()
    while queue and len(seen) < _NODES:
        node: Any = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(tuple(made.shape) in squares for made in getattr(node, "_input_metadata", ())):
            return True
        queue.extend(after for after, _ in node.next_functions)
    return False


_FACTORS = ("router_aux_loss_coef", "router_z_loss_coef")
"""The factors of load-balancing losses, which models of transformers or their configurations have as attributes."""


def load_balancing_warning(model: nn.Module) -> list[str]:
    """Return a warning if the loss of `model` has a load-balancing term for its experts."""
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    owners = [*model.modules(), *configs, *(getattr(config, "text_config", None) for config in configs)]
    is_on = any(getattr(owner, "output_router_logits", False) for owner in owners)
    has_factor = any(getattr(owner, name, None) for owner in owners for name in _FACTORS)
    message = (
        "the loss that balances experts (output_router_logits) is computed from the tokens of a micro-batch, not of the"
        " effective batch, so that the gradient is not quite the full batch's: output_router_logits=False leaves it out"
    )
    return [message] if is_on and has_factor else []


def check_gradients(model: nn.Module, trained: Sequence[Tensor], sums: Collection[Tensor]) -> None:
    """Raise WorkloadError unless one of the parameters of `model` that are `trained` has a gradient, or one of `sums`.

    A gradient of zeros is one.
    """
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    expected = [parameter for parameter in trained if id(parameter) in own]
    if expected and not any(one.grad is not None or one in sums for one in expected):
        raise WorkloadError(
            "no gradient reaches the model: the loss does not use the model it is given, or detaches its outputs",
            hint=f"call the model that is passed to loss(model, batch); {AS_ONE_MODULE}",
        )


class BufferVersions:
    """Finds floating-point buffers that forward writes to; BatchNorm's are left out, since they have a warning.

    Buffers that forward replaces, such as a table it enlarges, do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions = {
            f"{prefix}{'.' if prefix else ''}{name}": (buffer, buffer._version)
            for prefix, module in model.named_modules()
            if not isinstance(module, BATCHNORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_inference()
        }

    def warnings(self) -> list[str]:
        """Return a warning that names the buffers written to since, if there are any."""
        names = [name for name, (buffer, version) in self._versions.items() if buffer._version != version]
        if not names:
            return []
        return [
            f"forward updates the buffers {list_names(names)}, once per micro-batch instead of once per update: where"
            " outputs depend on them (as in spectral_norm), the gradient is not the full batch's; freeze them with"
            " eval() on these modules"
        ]


class FirstSteps:
    """Warns of what the first steps of a training show, once each."""

    def __init__(self) -> None:
        self._is_first, self._has_warned, self._has_accumulated = True, False, False

    def watch(
        self, backpropagation: Backpropagation, modules: Sequence[nn.Module], *, is_split: bool
    ) -> Callable[[Sequence[Tensor], Collection[Tensor], str | None], None]:
        """Look at a step before its parts run; return a function to warn of what it has shown, and of another text.

        `is_split` tells whether the effective batch, over all ranks, has several parts. The function takes the
        parameters that are trained and were used here, and those whose gradients are summed elsewhere.
        """
        model = backpropagation.model
        versions = BufferVersions(model) if is_split and not self._has_accumulated else None
        messages = [] if self._has_warned else backpropagation.warnings(modules, accumulates=is_split)

        def warn(trained: Sequence[Tensor], sums: Collection[Tensor], rounding: str | None) -> None:
            if self._is_first:
                check_gradients(model, trained, sums)
            self._has_warned, self._is_first = self._has_warned or bool(messages), False
            found = list(messages)
            if versions is not None:
                self._has_accumulated = True
                found += [*load_balancing_warning(model), *versions.warnings()]
                found += [] if rounding is None else [rounding]
            for text in found:
                warn_caller(text)

        return warn
