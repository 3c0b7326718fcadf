"""The command line: one file per command, thin."""

from __future__ import annotations

from autoaccum.cli.root import main as main
