"""PyTorch's compiler, `torch._dynamo`: imported where it is used, and not with the first optimizer.

Its import takes half as long as that of PyTorch. No module here imports torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
_HIDING, _STEPPING = "torch._compile", "torch.optim.optimizer"


class AroundImport(MetaPathFinder):
    """Finds the module `name` as Python does, and runs it within `around(module)`."""

    def __init__(self, name: str, around: Callable[[ModuleType], AbstractContextManager[None]]) -> None:
        self._name, self._around = name, around

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find that module, and no other."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self._around(module):
                    execute(module)

            loader.exec_module = exec_module
        return spec


def put_off_compiler() -> None:
    """Let what PyTorch hides from its compiler, and optimizers, not import it; call this before PyTorch is imported.

    Where it is imported, nothing changes; until then nothing can be compiled, and these functions run as they are.
    """
    if "torch" not in sys.modules:
        sys.meta_path[:0] = [AroundImport(_HIDING, _hide_lazily), AroundImport(_STEPPING, _step_lazily)]


def is_put_off() -> bool:
    """Return whether the compiler is not imported yet, and will not be by functions that are hidden from it."""
    return COMPILER not in sys.modules and hasattr(sys.modules.get(_HIDING), "_autoaccum_lazy")


@contextmanager
def _hide_lazily(module: Any) -> Iterator[None]:
    yield
    hide = module._disable_dynamo

    def hide_lazily(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(hide_lazily, recursive=recursive)
        hidden = hide(function, recursive)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (hidden if COMPILER in sys.modules else function)(*args, **kwargs)

        return _placed_in(module, run)

    module._disable_dynamo, module._autoaccum_lazy = hide_lazily, True


def _placed_in(module: Any, function: Any) -> Any:
    """Return the function as part of a module's file, so that wrong arguments are not taken for a fault of ours."""
    function.__code__ = function.__code__.replace(co_filename=module.__file__)
    return function


@contextmanager
def _step_lazily(module: Any) -> Iterator[None]:
    yield
    decorate = module._use_grad_for_differentiable

    def decorate_lazily(step: Any) -> Any:
        decorated = decorate(step)

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if COMPILER in sys.modules:
                return decorated(*args, **kwargs)
            with module.torch.set_grad_enabled(args[0].defaults["differentiable"]):
                return step(*args, **kwargs)

        return _placed_in(module, run)

    module._use_grad_for_differentiable = decorate_lazily


class Unloaded:
    """Stands for a module until more of it is used than the attributes given here."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        # The import machinery asks for it, and would find this same stand-in again.
        vars(self).update(known, __spec__=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
