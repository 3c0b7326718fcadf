"""PyTorch's compiler, left out until it is used: it is a third of what a fake tensor and an optimizer import."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.simulation.torch_patches import unpatched

_NAME: Final = "torch._dynamo"


def defer_compiler() -> None:
    """Let imports of `torch._dynamo` find a module that is executed when it is asked for more than PyTorch itself does.

    PyTorch asks it for its settings, and to leave functions as they are.
    """
    spec = None if _NAME in sys.modules else find_spec(_NAME)
    if spec is None:
        return
    sys.modules[_NAME] = torch._dynamo = module = module_from_spec(spec)
    module.__class__ = _DeferredModule
    vars(module).update(disable=_leave, graph_break=lambda *_, **__: None)
    import_module(f"{_NAME}.config")
    sys.meta_path.insert(0, _PartFinder)  # Its other parts refer to it as a whole.


def _leave(function: Any = None, *_: Any, **__: Any) -> Any:
    return _leave if function is None else function


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Execute the module."""
        sys.meta_path.remove(_PartFinder)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec: Any = self.__spec__
        with unpatched(), _disable_current_modes():  # It compares PyTorch's functions with its own.
            spec.loader.exec_module(self)
        gc.collect()  # Exceptions in it hold the frames of a traced step, and its tensors.


class _PartFinder:
    """Finds a part of the deferred module by executing that, which imports most parts: those are not imported again."""

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> ModuleSpec | None:
        """Return a spec of the part that is there then; None: the other finders find it."""
        if name.rpartition(".")[0] != _NAME:
            return None
        whole: Any = sys.modules[_NAME]
        whole.load()
        part = sys.modules.get(name)
        if part is None:
            return None
        loader: Any = _Imported(part)
        part.__spec__ = spec_from_loader(name, loader)  # Python takes this one of a part that is there.
        return part.__spec__


class _Imported:
    """Loads a module that has been imported, which gets its spec back then."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""
        module.__spec__ = self._spec
