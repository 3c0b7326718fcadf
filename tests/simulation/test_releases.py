"""The table of rules that came with releases of PyTorch."""

from __future__ import annotations

import re

import pytest

from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.simulation.releases import CUDNN, RULES, holds

OLDEST, NEWEST = (2, 11), (2, 15)


@pytest.mark.parametrize("name", RULES)
def test_a_row_has_its_release_and_its_source(name: str) -> None:
    rule = RULES[name]
    assert OLDEST < rule.since <= NEWEST
    assert rule.change
    assert re.match(r"(ATen|c10)/\S+\.(cpp|cu|h), .*pytorch/pytorch#\d+", rule.source)
    assert not holds(name, (rule.since[0], rule.since[1] - 1))
    assert holds(name, rule.since)
    assert holds(name, (3, 0)), "a release that is newer than all rows follows all rules"


def test_all_supported_releases_have_a_cudnn() -> None:
    assert min(CUDNN) == OLDEST <= read_torch_release()
    assert list(CUDNN.values()) == sorted(CUDNN.values())
