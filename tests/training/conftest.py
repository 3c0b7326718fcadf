from __future__ import annotations

import pytest

from autoaccum.accumulation.coupling import Coupling
from autoaccum.training import loop


@pytest.fixture
def known_coupling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the experiment before a first update, of which most of a run of ten updates consists."""
    monkeypatch.setattr(loop, "_probe_coupling", lambda components, batch: Coupling(loss=False))
