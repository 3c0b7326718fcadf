"""Names that differ only in numbers are shown as one, and different names stay distinct."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.sources.module_names import compact_names, expand_name, module_files

NUMBERS = st.integers(0, 12)
NAMES = st.one_of(
    st.builds("layer{}.{}.conv{}".format, NUMBERS, NUMBERS, st.integers(1, 3)), st.builds("h.{}".format, NUMBERS)
)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["wte"], ["wte"]),
        (["h.0.mlp.0", "h.1.mlp.0", "h.2.mlp.0"], ["h.{0..2}.mlp.0"]),
        (["h.2", "h.0", "h.1", "h.7"], ["h.{0..2,7}"]),
        (["h.9", "head", "h.10"], ["h.{9,10}", "head"]),
        (["1.1", "2.2"], ["1.1", "2.2"]),
    ],
    ids=["one", "a run", "in any order", "other between", "no product"],
)
def test_names_that_differ_only_in_numbers_become_one_pattern(names: list[str], pattern: list[str]) -> None:
    compact = compact_names(names)
    assert [name for name, _ in compact] == pattern
    assert [sorted(expand_name(name)) for name, _ in compact] == [sorted(members) for _, members in compact]


@given(st.lists(NAMES, max_size=30))
def test_a_pattern_stands_for_exactly_its_names(names: list[str]) -> None:
    compact = compact_names(names)
    assert all(sorted(expand_name(pattern)) == sorted(members) for pattern, members in compact)
    assert sorted(name for _, members in compact for name in members) == sorted(set(names))
    assert len({pattern for pattern, _ in compact}) == len(compact)


class Lazy(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise ImportError("an optional dependency is missing")


def test_any_entry_of_sys_modules_has_files_or_none() -> None:
    odd = SimpleNamespace(__path__=7, __file__="odd.py")
    odder = SimpleNamespace(__path__=["a", 3, "b"], __file__=3)
    found = [module_files(entry) for entry in (re, odd, odder, Lazy("lazy"), None, 5)]
    assert found == [[re.__file__, *re.__path__], ["odd.py"], ["a", "b"], [], [], []]
    assert all(module_files(module) is not None for module in list(sys.modules.values()))
