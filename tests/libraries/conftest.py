"""All of it is slow, its imports too; what needs timm is left out where there is none: it stands on torchvision."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("timm") else ["test_timm.py"]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return config.getoption("markexpr") == "not slow" or None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
