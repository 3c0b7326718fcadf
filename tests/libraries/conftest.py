"""All of it is slow, its imports too; tests/conftest.py leaves it out without the extra `libraries`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_children import Nurseries

# Lightning warns of loaders without workers, and uses what torch deprecates.
_THEIR_WARNINGS = (
    *(f"::{module}" for module in ("lightning", "pytorch_lightning", "accelerate", "transformers", "torch")),
    *(":DeprecationWarning", ":FutureWarning"),
)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return config.getoption("markexpr") == "not slow" or None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
    if "lightning" in item.path.name or "framework" in item.path.name:
        for theirs in _THEIR_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{theirs}"))


@pytest.fixture(scope="module")
def nurseries(request: pytest.FixtureRequest) -> Iterator[Nurseries]:
    """Those whose copies have imported what the module lists as `IMPORTED`, which may take 20 s of a processor."""
    known = Nurseries(getattr(request.module, "IMPORTED", ()))
    yield known
    for nursery in known.values():
        nursery.close()
