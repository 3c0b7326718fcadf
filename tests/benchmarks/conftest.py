from __future__ import annotations

collect_ignore = ["contenders/by_accelerate.py", "contenders/by_lightning.py"]
"""They import what only the extra `bench` installs; the rest is collected for its doctests."""
