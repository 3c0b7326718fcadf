"""Attributes that are exchanged come back; those that are not there are told with the version of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from autoaccum.devices.simulated.patches import replaced
from autoaccum.errors import UsageError


class Base:
    kept = 1


class Derived(Base):
    own = 2


@pytest.mark.parametrize("name", ["own", "kept"])
def test_what_was_there_comes_back(name: str) -> None:
    before = dict(vars(Derived))
    with suppress(ZeroDivisionError), replaced(Derived, name, 7):
        assert getattr(Derived, name) == 7
        assert Base.kept == 1
        raise ZeroDivisionError
    assert dict(vars(Derived)) == before


def test_what_is_not_there_is_told_with_the_version() -> None:
    with (
        pytest.raises(UsageError, match=rf"torch {torch.__version__[:4]}.* has no Derived\.gone"),
        replaced(Derived, "gone", 7),
    ):
        pass


@pytest.mark.parametrize("name", ["_group_tensors_by_device_and_dtype", "_conv_determine_backend_memory_format"])
def test_a_torch_that_changed_is_refused_and_not_mispredicted(
    name: str, simulated: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, name)
    failure = simulated("def model(): return nn.Linear(8, 4)")("inspect")["failure"]
    assert failure["blames"] == "user"
    assert f"torch {torch.__version__} has no torch._C.{name}" in failure["message"]
