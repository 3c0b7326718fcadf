"""Every update is a line of JSON, whatever happens to the disk and the process."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest

from autoaccum.training.fit_events import Evaluated, Updated
from autoaccum.training.run_folder import MetricsLog


def updated(update: int, **figures: Any) -> Updated:
    known: dict[str, Any] = {"epoch": 1, "samples": 8 * update, "loss": 0.5, "grad_norm": 2.0, "learning_rate": 0.1}
    known |= {"samples_per_second": 100.0, "peak_bytes": None, "micro_batches": 2, "micro_batch": 4, "retries": 0}
    return Updated(update=update, **{**known, "updated": True, **figures})


def evaluated(update: int) -> Evaluated:
    return Evaluated(update=update, values={"loss": 0.25}, samples=10, seconds=1.0)


def never(event: Any) -> None:
    pytest.fail(event.text)


def lines(folder: Path) -> list[dict[str, Any]]:
    def not_json(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    path = folder / "metrics.jsonl"
    return [json.loads(line, parse_constant=not_json) for line in path.read_text().splitlines()]


def test_lines_have_their_values_in_order(tmp_path: Path) -> None:
    nan = float("nan")
    with MetricsLog(tmp_path, 0, 0, never) as log:
        log.on_event(updated(1))
        log.on_event(updated(2, loss=nan, grad_norm=float("inf"), terms={"a": nan, "b": 1.0}))
        log.on_event(evaluated(2))
    first, second, third = lines(tmp_path)
    assert ",".join(first) == (
        "update,epoch,samples,loss,grad_norm,learning_rate,samples_per_second,peak_bytes,micro_batches,micro_batch,"
        "retries,updated"
    )
    assert (second["loss"], second["grad_norm"]) == (None, None)
    assert [*second][-1] == "terms"
    assert second["terms"] == {"a": None, "b": 1.0}
    assert third == {"update": 2, "evaluation": {"loss": 0.25}, "samples": 10}


def test_resuming_drops_lines_of_repeated_updates_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, 0, 0, never) as log:
        for update in range(1, 6):
            log.on_event(updated(update))
            log.on_event(evaluated(update))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    for update, evaluated_at, count in ((5, 5, 9), (5, 5, 9), (3, 3, 6), (9, 9, 6), (3, 2, 5), (0, 0, 0)):
        with MetricsLog(tmp_path, update, evaluated_at, never) as log:
            assert len(lines(tmp_path)) == count
            assert whole.startswith(path.read_bytes())
            if not count:
                log.on_event(updated(1))
    assert [line["update"] for line in lines(tmp_path)] == [1]


def log_with_a_full_disk(folder: Path, said: Any) -> None:
    log = MetricsLog(folder, 0, 0, lambda event: said.put(event.text))
    log.on_event(updated(1))
    size = (folder / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size - 20, resource.RLIM_INFINITY))
    log.on_event(updated(2))
    log.on_event(updated(3))
    assert (folder / "metrics.jsonl").stat().st_size == size
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.on_event(updated(4))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 advises against fork.
def test_a_full_disk_loses_lines_but_no_part_of_one(tmp_path: Path) -> None:
    """In a process of its own, since TensorBoard's thread may fail at its own file."""
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    process = context.Process(target=log_with_a_full_disk, args=(tmp_path, said))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert "cannot be written" in said.get()
    assert "cannot be written" in said.get()
    assert [line["update"] for line in lines(tmp_path)] == [1, 4]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(entry.step, entry.value) for entry in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_same_if_installed(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, 0, 0, never) as log:
        for update in (1, 2, 3):
            log.on_event(updated(update, loss=float(update), terms={"a": 1.5}))
        log.on_event(evaluated(3))
    with MetricsLog(tmp_path, 2, 2, never) as log:
        log.on_event(updated(3, loss=9.0))
    values = scalars(tmp_path / "tensorboard")
    assert values["train/loss"] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert values["terms/a"] == [(1, 1.5), (2, 1.5)]
    assert values.get("evaluation/loss", []) == []
    assert "train/peak_bytes" not in values
