"""All of it is slow, its imports too; tests/conftest.py leaves it out without the extra `libraries`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_children import Nurseries

# By names of files: Lightning warns of loaders without workers and uses what torch deprecates; others let torch warn.
_OF_LIGHTNING = ("::lightning", "::pytorch_lightning", "::torch.jit", ":DeprecationWarning", ":FutureWarning")
_OF_FRAMEWORKS = (*_OF_LIGHTNING, "::accelerate", "::transformers", "::torch")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return config.getoption("markexpr") == "not slow" or None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
    of_lightning = _OF_LIGHTNING if "lightning" in item.path.name else ()
    trains_by_frameworks = any(word in item.path.name for word in ("framework", "arguments"))
    for theirs in _OF_FRAMEWORKS if trains_by_frameworks else of_lightning:
        item.add_marker(pytest.mark.filterwarnings(f"ignore:{theirs}"))


@pytest.fixture(scope="module")
def nurseries(request: pytest.FixtureRequest) -> Iterator[Nurseries]:
    """Those whose copies have imported what the module lists as `IMPORTED`, which may take 20 s of a processor."""
    with Nurseries(getattr(request.module, "IMPORTED", ())).running() as nurseries:
        yield nurseries
