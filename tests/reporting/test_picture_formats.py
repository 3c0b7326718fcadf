from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from autoaccum.errors import UsageError
from autoaccum.reporting.pictures import formats
from autoaccum.reporting.pictures.formats import picture_format


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
        (".svg", "the picture .svg is an ending without a name"),
    ],
)
def test_other_endings_are_refused(path: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        picture_format(path)
    assert str(caught.value) == f"{seen}: give a name that ends in .svg or .png"


def test_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("matplotlib") is not None
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'not installed: pip install "autoaccum\[plot\]", or leave out --plot'):
        picture_format("memory.svg")


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ('raise ImportError("no libfreetype\\nin sight")', "no libfreetype"),
        ("raise AttributeError", "AttributeError"),
    ],
    ids=["message", "kind"],
)
def test_what_is_installed_and_broken_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, seen: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        picture_format("memory.svg")
    assert str(caught.value) == (
        f"matplotlib is installed but cannot be imported ({seen}): install it anew (pip install --force-reinstall "
        "matplotlib), or leave out --plot"
    )
