"""Snapshots are read without running what is in them; tests/cli/test_explain_command.py reads a real one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from autoaccum.errors import UsageError
from autoaccum.simulation.allocator.recording import read_recording

EMPTY: dict[str, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


FREED = {"action": "free_completed", "addr": 512, "size": 8}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"not a pickle", "is no snapshot, or only a part of one"),
        (pickle.dumps(EMPTY)[:-20], "is no snapshot, or only a part of one"),
        (
            pickle.dumps({**EMPTY, "more": Harmful()}),
            "would import posix.mkdir, and a snapshot has plain",
        ),
        (pickle.dumps({"a": 1}), "is no snapshot of PyTorch's allocator (Object missing required field `segments`)"),
        (pickle.dumps(EMPTY), "has no history of events: call torch.cuda.memory._record_memory_history()"),
        (pickle.dumps({**EMPTY, "device_traces": [[FREED], [FREED]]}), "has events of 2 cards"),
        (pickle.dumps({**EMPTY, "device_traces": [[FREED, FREED]]}), "is not complete: the block at 0x200 is freed"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(
    content: bytes | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("step.pickle").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_recording("step.pickle")
    assert told in str(refused.value)
    assert str(refused.value).startswith(("step.pickle ", "the history in step.pickle "))
    assert "\n" not in str(refused.value)
    assert not Path("harm").exists()
