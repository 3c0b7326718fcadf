"""Snapshots are read without running what is in them, and those that PyTorch's own allocator wrote replay exactly."""

from __future__ import annotations

import json
import lzma
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import short_histories
from short_histories import ShortHistory

from autoaccum.errors import UsageError
from autoaccum.simulation.allocator.recording import (
    ReplayDifference,
    read_recording,
    replay_recording,
)

FILE = Path(short_histories.__file__).parent / "real_allocator" / "histories.json"
HISTORIES: list[ShortHistory] = json.loads(FILE.read_text())
EMPTY: dict[str, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}


def make_snapshot(history: ShortHistory, first: int = 0) -> dict[str, Any]:
    """Return a history as a snapshot whose record begins with its entry number `first`."""
    segments: dict[int, int] = {}
    alive: dict[int, int] = {}
    for action, address, size in history["entries"]:
        if action in ("segment_alloc", "segment_free"):
            segments[address] = size if action == "segment_alloc" else 0
        elif action in ("alloc", "free_completed"):
            alive[address] = size
    entries = [{"action": action, "addr": at, "size": size} for action, at, size in history["entries"][first:]]
    return {
        "segments": [
            {
                "address": start,
                "total_size": size,
                "blocks": [
                    {
                        "address": at,
                        "size": inside,
                        "requested_size": alive.get(at, 0),
                        "state": "active_allocated" if used else "inactive",
                    }
                    for at, inside, used in history["blocks"]
                    if start <= at < start + size
                ],
            }
            for start, size in segments.items()
            if size
        ],
        "device_traces": [entries],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": history["conf"]},
    }


def replay(folder: Path, snapshot: dict[str, Any]) -> ReplayDifference | None:
    file = folder / "step.pickle"
    file.write_bytes(pickle.dumps(snapshot))
    return replay_recording(read_recording(file))


@pytest.mark.parametrize("number", [0, 1], ids=["free", "refused"])
def test_addresses_are_equal_wherever_the_record_begins(number: int, tmp_path: Path) -> None:
    history = HISTORIES[number]
    for first in range(0, len(history["entries"]), 7):
        assert replay(tmp_path, make_snapshot(history, first)) is None, first


def test_two_streams_have_blocks_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    with lzma.open(FILE.with_name("two_streams.pickle.xz")) as packed:
        file.write_bytes(packed.read())
    recording = read_recording(file)
    assert len({entry.stream for entry in recording.entries}) == 2
    assert replay_recording(recording) is None


@pytest.mark.parametrize(
    ("action", "further", "larger", "recorded", "replayed"),
    [
        ("alloc", 512, 0, "address", "address"),
        ("segment_alloc", 0, 2 << 20, "a new segment of", "a new segment of"),
        ("segment_free", 512, 0, "the segment is free, and goes back", "some of it is used"),
    ],
)
def test_a_planted_difference_is_found(
    action: str, further: int, larger: int, recorded: str, replayed: str, tmp_path: Path
) -> None:
    snapshot = make_snapshot(HISTORIES[1])
    file = tmp_path / "step.pickle"
    file.write_bytes(pickle.dumps(snapshot))
    recording = read_recording(file)
    number = max(number for number, entry in enumerate(recording.entries) if entry.action == action)
    planted = dict(snapshot["device_traces"][0][number])
    object.__setattr__(recording.entries[number], "addr", planted["addr"] + further)
    object.__setattr__(recording.entries[number], "size", planted["size"] + larger)
    found = replay_recording(recording)
    assert found is not None
    assert found.recorded.startswith(recorded)
    assert found.replayed.startswith(replayed)
    assert found.event in (number, number + 1)
    assert found.certain


def test_a_difference_that_a_larger_block_from_before_could_explain_is_not_certain(tmp_path: Path) -> None:
    mib, start = 1 << 20, 1 << 40
    used = {"address": start + 8 * mib, "size": 2 * mib, "requested_size": 2 * mib, "state": "active_allocated"}
    free = [(start, 8 * mib), (start + 10 * mib, 10 * mib)]
    blocks = [used, *({"address": at, "size": size, "state": "inactive"} for at, size in free)]
    entries = [
        {"action": "alloc", "addr": start + 8 * mib, "size": 2 * mib},
        {"action": "free_completed", "addr": start, "size": 5 * mib},
    ]
    segments = [{"address": start, "total_size": 20 * mib, "blocks": blocks}]
    found = replay(tmp_path, {**EMPTY, "segments": segments, "device_traces": [entries]})
    assert found is not None
    assert (found.event, found.certain) == (0, False)


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
