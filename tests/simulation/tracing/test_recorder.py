"""What a recorder makes of a storage whose end it is told late, as when another thread collects garbage."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from autoaccum.simulation.tracing.recorder import Recorder


def new_storage() -> torch.UntypedStorage:
    return torch.empty(64, dtype=torch.uint8).untyped_storage()


def end_storage(recorder: Recorder, between: Callable[[], object]) -> None:
    """Record a storage and end it; do something after its end, both before and after the recorder is told of it."""
    storage = new_storage()
    calls = [weakref.ref(storage, lambda _: between())]
    recorder.record_storage(storage, torch.float32)
    calls.append(weakref.ref(storage, lambda _: between()))
    del storage
    assert all(ref() is None for ref in calls)


def test_a_storage_that_is_gone_is_not_allocated_again_in_the_next_trace() -> None:
    recorder, seen = Recorder("cpu"), list[int]()

    def begin() -> None:
        recorder.begin(lambda: "start")
        seen.append(recorder.live_bytes)

    end_storage(recorder, begin)
    assert seen == [0, 0]
    assert not recorder.events
    assert not recorder.live_storages()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_storage_may_be_forgotten_before_its_end_is_told() -> None:
    recorder = Recorder("cpu")
    end_storage(recorder, lambda: recorder.forget_all_but({}))
    assert not recorder.live_storages()


def test_a_new_storage_in_the_place_of_one_that_is_gone_is_recorded() -> None:
    recorder = Recorder("cpu")
    storage = new_storage()
    key = id(storage)
    first = weakref.ref(storage, lambda _: recorder._free_ended(key))
    recorder.record_storage(storage, torch.float32)
    last = weakref.ref(storage, lambda _: recorder._free_ended(key))
    del storage
    assert (first(), last()) == (None, None)
    assert recorder.events == [0, ~0], "freed once, by whoever comes first"


def test_a_new_storage_in_the_place_of_an_earlier_one_is_forgotten_with_the_others() -> None:
    recorder, storage = Recorder("cpu"), new_storage()
    recorder.record_storage(storage, torch.float32)
    earlier, key = dict(recorder.live_storages()), id(storage)
    del storage
    others = [new_storage() for _ in range(100)]
    storage = next(each for each in others if id(each) == key)
    recorder.record_storage(storage, torch.float32)
    recorder.forget_all_but(earlier)
    assert list(earlier) == [key]
    assert not recorder.live_storages()
