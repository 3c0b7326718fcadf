"""What ranks allocate to share a model and its gradients: the parameters that they gather, and what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.ranks import replicated
from autoaccum.accumulation.ranks.sharded import param_groups
from autoaccum.accumulation.sharded_tensors import fsdp2_modules
from autoaccum.devices.explanation import Category
from autoaccum.devices.simulated.torch_patches import patched


class RankPurposes:
    """Knows the purpose of what is being allocated, and the module that it is for, within `watching()`.

    Attributes:
        purpose: `gathered_parameters`, `communication`, or `gradients` that are summed in another dtype, while FSDP2 or
            the sum of replicated gradients allocates for it; else None.
        module: The module whose parameters are gathered or whose gradients are reduced; None for those of all.
    """

    def __init__(self) -> None:
        self.purpose: Category | None = None
        self.module: nn.Module | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the functions that allocate for several ranks."""
        with ExitStack() as stack:
            self._watch(stack, replicated, "_allocate", "communication")
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                from torch.distributed.fsdp._fully_shard import _fsdp_param_group

                group = _fsdp_param_group.FSDPParamGroup
                self._watch(stack, group, "unshard", "communication", of_group=True)
                self._watch(stack, group, "wait_for_unshard", "gathered_parameters", of_group=True)
                self._watch(stack, group, "post_backward", None, of_group=True)
                self._watch(stack, _fsdp_param_group, "foreach_reduce", "communication")
                self._watch(stack, GradientBuffers, "_collect", "gradients")  # FSDP2 calls it while it reduces.
            yield

    def _watch(
        self, stack: ExitStack, owner: Any, name: str, purpose: Category | None, *, of_group: bool = False
    ) -> None:
        run: Callable[..., Any] = getattr(owner, name)

        def watch(*args: Any, **kwargs: Any) -> Any:
            before = self.purpose, self.module
            self.purpose = purpose
            if of_group:
                self.module = args[0].modules[0]
            try:
                return run(*args, **kwargs)
            finally:
                self.purpose, self.module = before

        stack.enter_context(patched(owner, name, watch))


def unsharded_gradients(model: nn.Module) -> Iterable[tuple[Tensor, nn.Module]]:
    """Yield the gradients that FSDP2 has not reduced yet, each with the module of its parameter."""
    for one in [one for module in fsdp2_modules(model) for group in param_groups(module) for one in group.fsdp_params]:
        own = getattr(one, "_unsharded_param", None)
        for gradient in (None if own is None else own.grad, one.unsharded_accumulated_grad):
            if gradient is not None:
                yield gradient, one._module_info.module
