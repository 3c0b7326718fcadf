"""The colours of figures and pages, light and dark, by role or category of memory; without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from autoaccum.devices.explanation import Category

LIGHT: Final[Mapping[str, str]] = {
    "panel": "#ffffff",
    "ink": "#1f2328",
    "muted": "#59636e",
    "limit": "#cf222e",
    "ran": "#0b5cad",
    "room": "#1a7f37",
    "parameters": "#2270d8",
    "gradients": "#ad2c0a",
    "optimizer_state": "#6726c9",
    "averages": "#b0399f",
    "gathered_parameters": "#0f6f9c",
    "communication": "#7a5a00",
    "activations": "#2f6f64",
    "outputs": "#5f1118",
    "temporaries": "#8a7038",
    "workspace": "#1a3560",
    "unused": "#6e7781",
}
"""Colours by role or category: each has contrast to the panel (WCAG 4.5), and all differ, so they can be replaced."""

DARK: Final[Mapping[str, str]] = {
    "panel": "#0d1117",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "limit": "#ff7b72",
    "ran": "#79c0ff",
    "room": "#56d364",
    "parameters": "#64b0e8",
    "gradients": "#e67a22",
    "optimizer_state": "#9370f0",
    "averages": "#b56a9f",
    "gathered_parameters": "#3d8fb5",
    "communication": "#c9a227",
    "activations": "#4fd0a1",
    "outputs": "#e8505e",
    "temporaries": "#f0d22e",
    "workspace": "#bfe3f2",
    "unused": "#8b949e",
}
"""The same for a viewer that prefers dark."""


def label(category: Category) -> str:
    """Return the name of a category for people."""
    return category.replace("_", " ")
