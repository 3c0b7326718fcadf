"""Recompute repeated blocks of a model in backward, in an Accumulator's steps alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.accumulation.savers.activation_checkpointing import checkpoint_blocks, find_blocks, list_modules
from autoaccum.accumulation.sharded_tensors import model_class
from autoaccum.errors import UsageError


class Recompute:
    """Runs some of the repeated blocks of a model again in backward, evenly spread over it.

    Attributes:
        names: The paths of these blocks.

    Args:
        model: The model.
        blocks: How many of its blocks; 0: all of them.
        exact_batchnorm: Whether BatchNorm normalises by the whole batch, which cannot be done again in backward.

    Raises:
        UsageError: The model has fewer blocks with parameters to train, they have BatchNorms that cannot run again, or
            they are compiled together with what is around them.
    """

    def __init__(self, model: nn.Module, blocks: int = 0, *, exact_batchnorm: bool = False) -> None:
        found = trained_blocks(model)
        count = blocks or len(found)
        if not found or count > len(found):
            raise UsageError(
                f"{blocks or 'all'} blocks are to be recomputed, and {model_class(model).__name__} has"
                f" {len(found) or 'no'} repeated blocks with parameters to train",
                hint="checkpoint in the model itself (torch.utils.checkpoint), or choose another saver",
            )
        self._model = model
        self.names = [found[index * len(found) // count] for index in range(count)]
        for name in self.names:
            if _is_compiled(model, name):
                raise UsageError(
                    f"torch.compile has made {name} one with what is around it, so that it cannot be recomputed alone",
                    hint="checkpoint in the model itself (torch.utils.checkpoint), or choose another saver",
                )
            norms = any(isinstance(module, BATCHNORMS) for module in model.get_submodule(name).modules())
            if exact_batchnorm and norms:
                raise UsageError(
                    f'batchnorm is "exact", and the recomputed {list_modules([name])} has BatchNorms, which would wait'
                    " for other parts in backward",
                    hint='take batchnorm="running" or "frozen", or another saver',
                )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Recompute in forwards and backwards within it."""
        undo = checkpoint_blocks(self._model, self.names)
        try:
            yield
        finally:
            undo()


def _is_compiled(model: nn.Module, name: str) -> bool:
    """Return whether the block of that name runs within compiled code, where Dynamo cannot trace its checkpointing."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    if any(isinstance(getattr(module, "_orig_mod", None), nn.Module) for module in around):
        return True
    return any(module._compiled_call_impl is not None for module in (*around, model.get_submodule(name)))


def trained_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the repeated blocks of `model` that have parameters to train."""
    return [
        name for name in find_blocks(model) if any(one.requires_grad for one in model.get_submodule(name).parameters())
    ]
