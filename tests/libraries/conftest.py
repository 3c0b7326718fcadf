"""Leaves out what needs timm where it is not: it stands on torchvision, which has no build beside a CPU torch."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("timm") else ["test_timm.py"]
