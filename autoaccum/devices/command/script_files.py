"""Stub."""

from pathlib import Path


def protect(files: Path) -> None:
    """Stub."""


def remove_made(files: Path) -> None:
    """Stub."""
