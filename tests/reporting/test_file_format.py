from __future__ import annotations

import importlib.util

import pytest

from autoaccum.errors import UsageError
from autoaccum.reporting.figures import file_format
from autoaccum.reporting.figures.file_format import picture_format


@pytest.mark.parametrize(
    ("path", "form"), [("memory.svg", "svg"), ("a.b/memory.PNG", "png"), ("x.png.svg", "svg"), (" .svg.png", "png")]
)
def test_the_ending_decides(path: str, form: str) -> None:
    assert picture_format(path) == form


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("memory.pdf", "the picture memory.pdf ends in .pdf"),
        ("memory", "the picture memory has no ending"),
    ],
)
def test_other_endings_are_refused(path: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        picture_format(path)
    assert str(caught.value) == f"{seen}: give a name that ends in .svg or .png"


def test_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("matplotlib") is not None
    monkeypatch.setattr(file_format, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'not installed: pip install "autoaccum\[plot\]", or leave out --plot'):
        picture_format("memory.svg")
