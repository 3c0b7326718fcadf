"""A guard of one of several ranks: locked, compared, and told apart by how they train one model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_schemas import faults
from small_classifier import layers_file

import autoaccum
from autoaccum.guarding.cases import case_name
from autoaccum.guarding.lock import read_lock


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_ranks_are_locked_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, lock = tmp_path / "model.py", tmp_path / "autoaccum.lock"
    file.write_text(layers_file(256, 256, 256, 4))
    for more in ({"parallel": "ddp"}, {"parallel": "fsdp2"}, {"parallel": "fsdp2", "mesh": (2, 2)}):
        report = autoaccum.guard("model.py", gpu="rtx3090", target_batch=64, world_size=4, update=True, **more)
        assert report.exit_code == 0
    assert faults("lock", *map(json.loads, lock.read_text().splitlines())) == []
    locked = {case_name(case): found for case, found in read_lock(lock).items()}
    of = "model.py --gpu rtx3090 --target-batch 64 --world-size 4 --parallel "
    assert [*locked] == [of + "ddp", of + "fsdp2", of + "fsdp2 --mesh 2x2"]
    parameters = [
        sum(holding.bytes for holding in found.holdings if holding.category == "parameters")
        for found in locked.values()
    ]
    assert parameters[0] > 3.9 * parameters[1]
    assert parameters[2] == 2 * parameters[1]
    assert autoaccum.guard(parallel="fsdp2", mesh="2x2").exit_code == 0

    file.write_text(layers_file(256, 256, 256, 256, 256, 4))
    report = autoaccum.guard(parallel="fsdp2", mesh="2x2")
    assert report.exit_code == 1
    assert [case_name(verdict.case) for verdict in report.verdicts] == [of + "fsdp2 --mesh 2x2"]
