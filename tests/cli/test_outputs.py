"""The files of a plan: what cannot be written is refused before any trial."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from synthetic_traces import INSPECTION

from autoaccum.cli.outputs import Outputs
from autoaccum.errors import UsageError
from autoaccum.planning.plan_events import Inspected


def test_a_mode_that_cannot_be_emitted_is_refused_once_it_is_known(tmp_path: Path) -> None:
    outputs = Outputs(None, str(tmp_path / "step.py"), None, force=False)
    for joining in (dataclasses.replace(INSPECTION, coupled=True), dataclasses.replace(INSPECTION, joining="lockstep")):
        with pytest.raises(UsageError, match=r"cannot join .* a coupled loss or whole_batch\(x\): plan without --emit"):
            outputs.listen(Inspected(joining, "cpu", 1, 8, False))
    running = dataclasses.replace(INSPECTION, batchnorm="running")
    with pytest.raises(UsageError, match='cannot do batchnorm "running": plan with --batchnorm frozen'):
        outputs.listen(Inspected(running, "cpu", 1, 8, False))
    Outputs(None, None, None, force=False).listen(Inspected(running, "cpu", 1, 8, False))
