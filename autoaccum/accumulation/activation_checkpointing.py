"""Checkpoint the repeated blocks of a model: the same gradient from less memory, for a second forward in backward.

A checkpointed block stores only its inputs and computes its activations again for its backward (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", 2016; `torch/utils/checkpoint.py`, `use_reentrant=False`). The same random
numbers are drawn again, and a BatchNorm in it updates its running statistics in forward only. Other effects of a block
happen twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.checks import join_words
from autoaccum.errors import UsageError
from autoaccum.sharded_tensors import model_class
from autoaccum.sources.module_names import compact_names, mask_numbers

_MOST_NAMED = 3


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the repeated blocks of `model`: modules of one class, in names that differ by number only.

    The outermost blocks count, but a stage that is a list of blocks is not a block itself. Single PyTorch layers do not
    count either, since their backward needs little more than their input.
    """
    repeated = {kind for parent in model.modules() for kind in _repeated_in(parent)}
    lengths: dict[type, set[int]] = {kind: set() for kind in repeated}
    for module in model.modules():
        if type(module) in repeated:
            lengths[type(module)].add(_length(module, repeated))

    def is_stage(module: nn.Module) -> bool:
        varies = type(module) is nn.Sequential or len(lengths[type(module)]) > 1
        return varies and _length(module, repeated) > 0

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, type]]:
        side_by_side = _repeated_in(parent)
        for name, child in parent.named_children():
            kind = type(child)
            # Two modules of the class Sequential are alike only in one list.
            alike = side_by_side if kind is nn.Sequential else repeated
            if kind in alike and not is_stage(child):
                yield prefix + name, kind
            else:
                yield from walk(child, f"{prefix}{name}.")

    blocks = list(walk(model, ""))
    number = Counter(kind for _, kind in blocks)
    return tuple(name for name, kind in blocks if number[kind] > 1)


@contextmanager
def checkpointed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Run the modules at these paths, and copies of them, under `torch.utils.checkpoint` within it."""
    before: dict[nn.Module, Any] = {}
    for name in names:
        module = model.get_submodule(name)
        if module not in before:  # One block may have several names.
            before[module] = vars(module).get("forward")
            norms = [inner for inner in module.modules() if isinstance(inner, BATCHNORMS)]
            module.forward = partial(_run, module, before[module], norms)
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def describe_blocks(names: Sequence[str]) -> str:
    """Return the number and the paths of blocks in words, with `*` for the numbers in which paths differ.

    >>> describe_blocks(["h.0", "h.1", "h.2"])
    '3 blocks h.{0..2}'
    >>> describe_blocks(["layer1.0", "layer1.1", "layer2.0"])
    '3 blocks layer1.{0,1} and layer2.0'
    >>> describe_blocks(["encoder.block.0", "decoder.block.0", "decoder.block.1"])
    '3 blocks encoder.block.0 and decoder.block.{0,1}'
    """
    return f"{len(names)} {'block' if len(names) == 1 else 'blocks'} {list_modules(names)}"


def list_modules(names: Sequence[str]) -> str:
    """Return the paths of modules in words, at most three patterns (see `compact_names`).

    >>> list_modules(["h.0.norm", "h.1.norm", "norm"])
    'h.{0,1}.norm and norm'
    """
    patterns = [pattern for pattern, _ in compact_names(names)]
    if len(patterns) > _MOST_NAMED:
        patterns[_MOST_NAMED - 1 :] = [f"{len(patterns) - _MOST_NAMED + 1} more kinds"]
    return join_words(patterns)


def _repeated_in(parent: nn.Module) -> list[type]:
    """Return the classes of which `parent` has several blocks, under names that differ by number only."""
    counts = Counter(
        (type(child), mask_numbers(name))
        for name, child in parent._modules.items()
        if child is not None and mask_numbers(name) != name and _is_block(child)
    )
    return [kind for (kind, _), count in counts.items() if count > 1]


def _is_block(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward or not any(True for _ in module.parameters()):
        return False  # A ModuleList does not run.
    bases = [kind for kind in type(module).__mro__ if kind is not nn.Module]
    is_layer = any(kind.__module__.startswith("torch.nn.modules.") for kind in bases)
    return not is_layer or any(True for child in module.children() for _ in child.parameters())


def _length(module: nn.Module, repeated: Set[type]) -> int:
    """Return the number of blocks that `module`, or a list in it, consists of."""
    most = 0
    for parent in (module, *module.children()):
        children = [child for child in parent._modules.values() if child is not None]
        kinds = {type(child) for child in children}
        if len(kinds) == 1 and kinds <= repeated:
            most = max(most, len(children))
    return most


@contextmanager
def _keeping_statistics(norms: Sequence[Any]) -> Iterator[None]:
    """Let BatchNorms in training mode leave their running statistics as they are."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum, norm.num_batches_tracked = momentum, batches


def _run(
    module: nn.Module, forward: Callable[..., Any] | None, norms: Sequence[nn.Module], *args: Any, **kwargs: Any
) -> Any:
    plain = partial(type(module).forward, module) if forward is None else forward
    # A list or a cache among the arguments may grow meanwhile: the second run gets the original entries.
    leaves, form = tree_flatten((args, kwargs))
    originals = [(args, kwargs)]
    del args, kwargs

    def call(*leaves: Any) -> Any:
        args, kwargs = originals.pop() if originals else tree_unflatten(leaves, form)
        return plain(*args, **kwargs)

    return checkpoint(
        call, *leaves, use_reentrant=False, context_fn=lambda: (nullcontext(), _keeping_statistics(norms))
    )


def choose_blocks(model: nn.Module, blocks: int = 0, *, exact_batchnorm: bool = False) -> list[str]:
    """Return the paths of `blocks` of a model's repeated blocks, evenly spread over it, to be run again in backward.

    Args:
        model: The model.
        blocks: How many of its blocks; 0: all of them.
        exact_batchnorm: Whether BatchNorm normalises by the whole batch, which cannot be done again in backward.

    Raises:
        UsageError: The model has fewer blocks with parameters to train, they have BatchNorms that cannot run again, or
            they are compiled together with what is around them.
    """
    hint = "checkpoint in the model itself (torch.utils.checkpoint), or choose another saver"
    candidates = trained_blocks(model)
    count = blocks or len(candidates)
    if not candidates or count > len(candidates):
        raise UsageError(
            f"{blocks or 'all'} blocks are to be recomputed, and {model_class(model).__name__} has"
            f" {len(candidates) or 'no'} repeated blocks with parameters to train",
            hint=hint,
        )
    names = [candidates[index * len(candidates) // count] for index in range(count)]
    for name in names:
        if _is_compiled(model, name):
            raise UsageError(
                f"torch.compile has made {name} one with what is around it, so that it cannot be recomputed alone",
                hint=hint,
            )
        norms = any(isinstance(module, BATCHNORMS) for module in model.get_submodule(name).modules())
        if exact_batchnorm and norms:
            raise UsageError(
                f'batchnorm is "exact", and the recomputed {list_modules([name])} has BatchNorms, which would wait'
                " for other parts in backward",
                hint='take batchnorm="running" or "frozen", or another saver',
            )
    return names


def _is_compiled(model: nn.Module, name: str) -> bool:
    """Return whether the block of that name runs within compiled code, where Dynamo cannot trace its checkpointing."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    if any(isinstance(getattr(module, "_orig_mod", None), nn.Module) for module in around):
        return True
    return any(module._compiled_call_impl is not None for module in (*around, model.get_submodule(name)))


def trained_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the repeated blocks of `model` that have parameters to train."""
    blocks = {name: model.get_submodule(name) for name in find_blocks(model)}
    return [name for name, block in blocks.items() if any(tensor.requires_grad for tensor in block.parameters())]
