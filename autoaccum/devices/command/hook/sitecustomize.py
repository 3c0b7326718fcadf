"""Enters each Python process of a command: its folder is the first of PYTHONPATH, and Python imports this at its start.

It waits for the import of torch and then starts `autoaccum.devices.command.watch`, whatever environment the process
runs in: autoaccum is found beside this file, and what it needs at the end of the path. Only the standard library is
used here.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))


class _AutoaccumFinder:
    """Finds `autoaccum` where this file lies, and nothing else there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "autoaccum":
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
        )


class _TorchFinder:
    """Starts the watch when torch has been imported; that it is only looked for, as libraries do first, starts none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(_TorchFinder)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, _TorchFinder)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_watch(module):
                if _TorchFinder in sys.meta_path:
                    sys.meta_path.remove(_TorchFinder)
                load(module)
                _start_watch()

            spec.loader.exec_module = load_and_watch
        return spec


def _start_watch():
    sys.meta_path.append(_AutoaccumFinder)
    packages = os.environ.get("AUTOACCUM_PACKAGES", "")
    if packages and packages not in sys.path:
        sys.path.append(packages)
    from autoaccum.devices.command.watch import start

    start()


def _run_hidden():
    """Run the sitecustomize that this one hides, if there is one."""
    paths = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "AUTOACCUM_COMMAND" in os.environ:
    sys.meta_path.insert(0, _TorchFinder)
_run_hidden()
