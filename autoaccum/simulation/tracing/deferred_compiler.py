"""PyTorch's compiler, left out until it is used: it is a third of what a fake tensor and an optimizer import."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
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
    del module.__path__  # Its other parts refer to it as a whole.


def _leave(function: Any = None, *_: Any, **__: Any) -> Any:
    return _leave if function is None else function


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        spec: Any = self.__spec__
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations
        with unpatched(), _disable_current_modes():  # It compares PyTorch's functions with its own.
            spec.loader.exec_module(self)
        return getattr(self, name)
