"""The line of the user's code for each module: of its class, or the one that makes it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torch import nn

from autoaccum.simulation.tracing.labelling import walk_modules
from autoaccum.simulation.tracing.module_lines import find_module_lines

SOURCE = """\
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([MLP()])
        self.head_of = 1
        self.head = nn.Sequential(
            nn.Linear(2, 2),
        )
        self.add_module("other", nn.Identity())
"""
LINES = {"": 8, "blocks": 11, "blocks.0": 3, "blocks.0.up": 6, "head": 13, "head.0": 13, "other": 8}


def test_a_module_has_the_line_of_its_class_or_the_one_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_with_lines.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("net_with_lines").Net()
    file = (tmp_path / "net_with_lines.py").resolve()
    assert find_module_lines(walk_modules(net)) == {path: f"{file}:{line}" for path, line in LINES.items()}
    several = [("Net", net), ("Net.head.0", net.head[0])]
    assert find_module_lines(several) == {"Net": f"{file}:8", "Net.head.0": f"{file}:13"}


def test_what_is_outside_of_the_users_files_has_none() -> None:
    nowhere = type("Nowhere", (nn.Sequential,), {"__module__": "of_no_file"})
    assert find_module_lines(walk_modules(nn.Sequential(nn.Linear(1, 1), nowhere()))) == {}
