"""The file format of a figure, checked before anything is drawn and without matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePath
from typing import Final, Literal

from autoaccum.errors import UsageError

Format = Literal["svg", "png"]
_ENDINGS: Final[dict[str, Format]] = {".svg": "svg", ".png": "png"}


def picture_format(path: str) -> Format:
    """Return the format of the ending of `path`; raise UsageError for another one, or if matplotlib is missing."""
    ending = PurePath(path).suffix
    if ending.lower() not in _ENDINGS:
        seen = f"ends in {ending}" if ending else "has no ending"
        raise UsageError(f"the picture {path} {seen}", hint="give a name that ends in .svg or .png")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "a picture needs matplotlib, which is not installed",
            hint='pip install "autoaccum[plot]", or leave out --plot',
        )
    return _ENDINGS[ending.lower()]
