"""The largest micro-batch that fits is sought anew: where it fell, that is a regression of its own."""

from __future__ import annotations

from pathlib import Path

from guarded_edits import edited
from guarded_gpt import BASE
from guarded_measuring import measure_here

from autoaccum.guarding.cases import make_case
from autoaccum.guarding.comparing import compare
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.records import Tolerance

CASE = make_case(workload="train.py", gpu="rtx3090", target_batch=256, memory="512MiB")
WIDER = edited((("4 * WIDTH", "6 * WIDTH"),))


def test_where_it_fell_that_is_told_beside_what_grew(tmp_path: Path) -> None:
    lock, (old, new) = tmp_path / "autoaccum.lock", (tmp_path / name for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    write_lock(lock, {CASE: measure_here(BASE, old, case=CASE).measurement})
    locked = read_lock(lock, "")[CASE]
    now = measure_here(WIDER, new, case=CASE, micro_batches=locked.micro_batches)
    largest = now.measurement.largest
    assert not locked.capped
    assert max(locked.micro_batches) <= locked.largest < 256
    assert 0 < largest < locked.largest
    judgement = compare(CASE, locked, now, Tolerance())
    assert judgement.exit_code == 1
    assert f"the largest micro-batch that fits fell from {locked.largest} to {largest}" in judgement.reasons
    assert "activations of blocks.*.mlp" in judgement.explanation
    assert judgement.explanation.endswith(f"; rtx3090 now holds {largest} instead of {locked.largest}")
