"""Plain values that modules of the user's own classes keep in Python: no rollback restores them, so they are told.

Looked at are numbers, strings, tensors, and small containers of these; nothing of a library's class or object is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.copies import MAPPINGS, SEQUENCES, StateCopy, is_plain_tensor
from autoaccum.accumulation.digest import Hasher
from autoaccum.accumulation.reach import code_names, find_methods, is_users
from autoaccum.workload import nests

_DEPTH = 3
_ENTRIES = 1024
_SHOWN = 8
_REGISTERED = frozenset(vars(nn.Module())) | {"training"}
_COMPUTED = "computed by forward"
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class OwnAttributes:
    """The values of plain attributes as they are now, to be compared and put back.

    Args:
        roots: Modules by the prefix of their names.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._kept = [(module, _plain_of(module)) for _, module in _own_modules(roots)]
        self._copy = StateCopy([kept for _, kept in self._kept])
        self._hashes = _hashes(roots)

    def changed(self) -> list[str]:
        """Names (`encoder.calls`) of attributes that came, went or changed."""
        return changed_names(self._hashes, _hashes(self._roots))

    def restore(self) -> None:
        """Give them their values back, the very objects; those that came since are gone."""
        for module, kept in self._kept:
            attributes = vars(module)
            for name in _plain_of(module).keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)
        self._copy.restore()


class Fingerprint:
    """Plain attributes of a model, by hash, and a sum of every parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = _hashes({"": model})
        self._parameters = {
            name: repr(_summable(parameter).sum().tolist())
            for name, parameter in model.named_parameters()
            if is_plain_tensor(parameter) and not parameter.is_meta
        }

    def changed_attributes(self, later: Fingerprint) -> list[str]:
        """Names (`encoder.calls`) of attributes that came, went or changed."""
        return changed_names(self._attributes, later._attributes)

    def changed_parameters(self, later: Fingerprint) -> list[str]:
        """Names of parameters whose sum changed."""
        return [name for name, token in later._parameters.items() if self._parameters.get(name, token) != token]


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What came, changed or went, but for what a forward computes anew."""
    names = [name for name, value in after.items() if name not in before or before[name] != value]
    names += [name for name in before if name not in after]
    return [name for name in names if _COMPUTED not in (before.get(name), after.get(name))]


def state_warning(before: Fingerprint, after: Fingerprint, is_batch_changed: bool) -> str | None:
    """One sentence that names what a rollback cannot restore; None when there is nothing."""
    attributes, parameters = before.changed_attributes(after), before.changed_parameters(after)
    found = []
    if attributes:
        found.append(f"Python attributes ({listed_names(attributes)})")
    if parameters:
        found.append(f"parameters ({listed_names(parameters)})")
    if is_batch_changed:
        found.append("the batch it is given")
    if not found:
        return None
    return (
        f"forward changes {' and '.join(found)}, which cannot be rolled back when memory runs out within a step: keep"
        " state in buffers (register_buffer), and change no inputs in place"
    )


def batch_versions(batches: Sequence[Any]) -> list[int]:
    """How often each tensor of `batches` was changed in place, and where views of it were."""
    return [tensor._version for tensor in nests.tensors(batches) if not tensor.is_inference()]


def listed_names(names: Sequence[str]) -> str:
    """The first of them, for a sentence."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _own_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, root in roots.items():
        yield from ((path, module) for path, module in root.named_modules(prefix=prefix) if is_users(type(module)))


def _hashes(roots: Mapping[str, nn.Module]) -> dict[str, str]:
    hasher = Hasher()
    return {
        f"{path}.{name}" if path else name: _COMPUTED if _is_computed(value) else hasher.hash(value)
        for path, module in _own_modules(roots)
        for name, value in _plain_of(module).items()
    }


def _plain_of(module: nn.Module) -> dict[str, Any]:
    """Where the class extends a library's (`PreTrainedModel`), only what its own methods name is the user's."""
    others = [base for base in type(module).__mro__ if not is_users(base)]
    is_of_torch = all(base.__module__.partition(".")[0] in ("torch", "builtins") for base in others)
    own = None if is_of_torch else {name for method in find_methods([module]) for name in code_names(method.__code__)}
    return {
        name: value for name, value in vars(module).items() if _is_kept(name, value) and (own is None or name in own)
    }


def _is_kept(name: str, value: Any) -> bool:
    return name not in _REGISTERED and _is_plain(value, _DEPTH)


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, _SCALARS):
        return True
    if isinstance(value, Tensor):
        return is_plain_tensor(value) and not isinstance(value, nn.Parameter) and not value.is_meta
    if depth == 0 or type(value) not in (*MAPPINGS, *SEQUENCES, tuple, frozenset) or len(value) > _ENTRIES:
        return False
    inner = [*value.keys(), *value.values()] if type(value) in MAPPINGS else value
    return all(_is_plain(entry, depth - 1) for entry in inner)


def _is_computed(value: Any) -> bool:
    """Whether a tensor has a graph, as an auxiliary loss that the next forward replaces: no state of later updates."""
    return any(tensor.grad_fn is not None for tensor in nests.tensors([value]))


def _summable(parameter: Tensor) -> Tensor:
    """The parameter itself, or its bytes as integers: float8 and wide unsigned dtypes cannot be added up."""
    values = parameter.detach()
    is_tiny_float = values.is_floating_point() and values.itemsize == 1
    if is_tiny_float or values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return values.view((torch.int8, torch.int16, torch.int32, torch.int64)[values.itemsize.bit_length() - 1])
    return values
