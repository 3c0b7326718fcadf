"""All of it is slow, its imports too; tests/conftest.py leaves it out without the extra `libraries`."""

from __future__ import annotations

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return config.getoption("markexpr") == "not slow" or None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
