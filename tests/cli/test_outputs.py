"""The files of a plan: what cannot be written is refused before any trial."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from synthetic_traces import INSPECTION

from autoaccum.cli.outputs import Outputs, check_report
from autoaccum.errors import UsageError
from autoaccum.planning.plan_events import Inspected


@pytest.mark.parametrize(
    ("report", "told"),
    [
        ("page.txt", r"the page page\.txt is no \.html file: give a name that ends in \.html"),
        ("there.html", r"there\.html exists already: add --force"),
        ("new.html", r"-o and --report both name new\.html: take two names"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_any_trial(
    report: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.html").touch()
    with pytest.raises(UsageError, match=told):
        Outputs({"-o": "new.html", "--report": report}, force=False).check("model.py", world_size=1)
    with pytest.raises(UsageError):
        check_report(report, {"-o": "new.html"}, force=False)


def test_a_mode_that_cannot_be_emitted_is_refused_once_it_is_known(tmp_path: Path) -> None:
    outputs = Outputs({"--emit": str(tmp_path / "step.py")}, force=False)
    for joining in (dataclasses.replace(INSPECTION, coupled=True), dataclasses.replace(INSPECTION, joining="lockstep")):
        with pytest.raises(UsageError, match="micro-batches need something of each other"):
            outputs.listen(Inspected(joining, "cpu", 1, 8, False))
    running = dataclasses.replace(INSPECTION, batchnorm="running")
    with pytest.raises(UsageError, match='batchnorm is "running"'):
        outputs.listen(Inspected(running, "cpu", 1, 8, False))
    Outputs({}, force=False).listen(Inspected(running, "cpu", 1, 8, False))
