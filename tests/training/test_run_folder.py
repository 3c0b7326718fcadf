"""A run's folder is locked, its files are whole or absent, and nothing in them needs code to load."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import resource
import signal
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_fit import metrics
from state_digests import digest
from torch import nn

from autoaccum.errors import CheckpointError, UsageError
from autoaccum.training.fit_events import Evaluated, Updated
from autoaccum.training.run_folder import (
    VERSION,
    MetricsLog,
    NotPortableError,
    RunFolder,
    read_checkpoint,
    write_file,
)


def hold(folder: Path, opened: Any, over: Any) -> None:
    """Be a run with a worker, which outlives it."""
    with RunFolder(folder):
        if os.fork() == 0:
            over.wait(120)
            os._exit(0)
        opened.set()
        signal.pause()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 advises against fork.
def test_a_second_run_is_refused_until_the_first_is_over_and_its_workers_do_not_hold_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    opened, over = context.Event(), context.Event()
    first = context.Process(target=hold, args=(tmp_path, opened, over))
    first.start()
    try:
        assert opened.wait(120)
        with pytest.raises(UsageError, match=rf"is in use by process {first.pid} on .*: wait for it, or use"):
            RunFolder(tmp_path)
    finally:
        first.kill()
        first.join()
    with RunFolder(tmp_path):
        over.set()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 advises against fork.
def test_a_worker_that_ends_leaves_it_locked(tmp_path: Path) -> None:
    def attempt() -> None:
        with pytest.raises(UsageError, match="is in use"):
            RunFolder(tmp_path)

    with RunFolder(tmp_path):
        for _ in range(2):
            worker = multiprocessing.get_context("fork").Process(target=attempt)
            worker.start()
            worker.join(60)
            assert worker.exitcode == 0


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


UNUSABLE: dict[Callable[[Path], Path | str], str] = {
    a_file: "is not a folder, or lies below a file: use another folder",
    lambda _: "/proc/autoaccum": "/proc/autoaccum cannot be written to (No such file or directory): use another",
    lambda folder: folder / "a\0b": "cannot be written to (",
}


@pytest.mark.parametrize("place", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    place: Callable[[Path], Path | str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        RunFolder(place(tmp_path))
    assert UNUSABLE[place] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_someone_else_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine")
    with pytest.raises(UsageError, match=r"holds plan.json and no checkpoint: training would overwrite"):
        RunFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("existed", [False, True])
def test_a_folder_without_a_checkpoint_is_left_as_it_was_found(tmp_path: Path, existed: bool) -> None:
    if existed:
        (tmp_path / "runs" / "a").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with RunFolder(tmp_path / "runs" / "a"):
        assert (tmp_path / "runs" / "a" / "run.lock").exists()
    assert sorted(tmp_path.rglob("*")) == before


# Checkpoints and weights.


def record(update: int = 0) -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "update": update,
        "model": {"weight": shared, "tied": shared, "half": torch.ones(3, dtype=torch.bfloat16)},
        "counts": Counter([1, 1]),
        "nest": [(1, 2.5, None, True), {"deep": [b"bytes", "text", 1 + 2j, 1 << 127]}, {3}],
        "order": OrderedDict(b=1, a=math.inf),
    }


def test_anybody_can_load_what_is_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        path = run.write_checkpoint(7, record(7))
    content = torch.load(path, weights_only=True)
    assert (content["format"], content["version"]) == ("autoaccum checkpoint", VERSION)
    read = read_checkpoint(path)
    assert digest(content["record"]) == digest(read) == digest(record(7))
    assert read["model"]["weight"] is read["model"]["tied"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_tensors_and_numpy_scalars_are_converted(tmp_path: Path) -> None:
    big = torch.arange(100_000.0)
    odd = {
        "slice": big[5:8],
        "wide": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
    }
    groups = {"keys": {np.int64(3): 1}, "groups": defaultdict(list, a=[1]), "rates": [np.float64(0.1), np.bool_(True)]}
    with RunFolder(tmp_path) as run:
        path = run.write_checkpoint(1, {**odd, **groups})
    read = read_checkpoint(path)
    for name, tensor in odd.items():
        assert torch.equal(read[name].to_dense(), tensor.detach().to_dense().resolve_conj())
    plain = {"keys": {3: 1}, "groups": {"a": [1]}, "rates": [0.1, True]}
    assert digest({name: read[name] for name in groups}) == digest(plain)
    assert path.stat().st_size < 20_000


NOT_PORTABLE: dict[str, tuple[Any, str]] = {
    "function": ({"scheduler": {"anneal_func": math.cos}}, "scheduler.anneal_func: it is a builtin_function_or_method"),
    "array": ({"data": [1, np.ones(2)]}, "data.1: it is a ndarray"),
    "object": ({"data": random.Random()}, "data: it is a Random"),
    "meta": ({"data": torch.ones(1, device="meta")}, "data: it is a Tensor"),
}


@pytest.mark.parametrize("kind", NOT_PORTABLE)
def test_a_state_that_needs_code_is_refused_by_name_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    content, reason = NOT_PORTABLE[kind]
    with RunFolder(tmp_path / "run") as run:
        with pytest.raises(NotPortableError, match="which would not load without running code: use") as caught:
            run.write_checkpoint(1, content)
        assert run.checkpoints() == []
    assert reason in str(caught.value)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def verdict(path: Path) -> str:
    try:
        return "whole" if digest(read_checkpoint(path)) == digest(record()) else "changed"
    except CheckpointError as error:
        return str(error)


def test_any_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        path = run.write_checkpoint(1, record())
    whole, generator, verdicts = path.read_bytes(), random.Random(1), list[str]()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        verdicts.append(verdict(path))
    assert "changed" not in verdicts
    assert not [text for text in verdicts if "\n" in text or "weights_only" in text]
    assert verdicts.count("whole") < 250
    path.write_bytes(whole[:-1000])
    assert "00001.pt is damaged or cannot be read: remove it: the same command then resumes" in verdict(path)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_checkpoint_can_run_code_and_another_format_is_refused(tmp_path: Path) -> None:
    path, mark = tmp_path / "checkpoint-00000002.pt", tmp_path / "owned"
    torch.save({"format": "autoaccum checkpoint", "record": Malicious(mark)}, path)
    assert "is damaged" in verdict(path)
    assert not mark.exists()
    for version in (VERSION - 1, VERSION + 1):
        write_file(path, {"format": "autoaccum checkpoint", "version": version})
        assert f"is of format {version}, this autoaccum reads format {VERSION}: resume" in verdict(path)


def test_only_the_newest_checkpoints_stay_and_unfinished_ones_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".checkpoint-00000001.pt.tmp").write_bytes(b"half")
    with RunFolder(tmp_path, max_checkpoints=3) as run:
        for update in (0, 100, 200, 99_999_999, 100_000_000):
            assert run.write_checkpoint(update, record(update)).name == f"checkpoint-{update:08}.pt"
        assert [path.name[11:-3] for path in run.checkpoints()] == ["100000000", "99999999", "00000200"]
        run.write_checkpoint(1, record(1))
        assert len(list((tmp_path / "checkpoints").iterdir())) == 4, "what came later is not removed before its time"


def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder(tmp_path) as run:
        earlier = run.write_checkpoint(1, {"weight": torch.zeros(1)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        try:
            for size in (100_000, 200_000, 10_000_000):
                with pytest.raises(CheckpointError, match=r"00002.pt cannot be written \(File too large\): free disk"):
                    run.write_checkpoint(2, {"weight": torch.zeros(size)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [*earlier.parent.iterdir()] == [earlier]


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"function": print}


def test_the_weights_are_a_plain_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with RunFolder(tmp_path) as run:
        path = run.write_weights(model.state_dict())
        with pytest.raises(NotPortableError, match=r"ema.pt cannot hold _extra_state.function: it is a builtin"):
            run.write_weights(Odd(1, 1).state_dict(), "ema.pt")
    assert model.load_state_dict(torch.load(path, weights_only=True)).missing_keys == []


# metrics.jsonl and TensorBoard.


def never(event: Any) -> None:
    pytest.fail(str(event.message))


def updated(update: int, **figures: Any) -> Updated:
    known: dict[str, Any] = {"epoch": 1, "samples": 8 * update, "loss": 0.5, "grad_norm": 2.0, "learning_rate": 0.1}
    known |= {"samples_per_second": 100.0, "peak_bytes": None, "micro_batches": 2, "micro_batch": 4, "retries": 0}
    return Updated(update=update, **{**known, "updated": True, **figures})


def evaluated(update: int) -> Evaluated:
    return Evaluated(update=update, values={"loss": 0.25}, samples=10, seconds=1.0)


def test_lines_have_their_values_in_order(tmp_path: Path) -> None:
    nan = float("nan")
    with MetricsLog(tmp_path, 0, 0, never) as log:
        log.on_event(updated(1))
        log.on_event(updated(2, loss=nan, grad_norm=float("inf"), terms={"a": nan, "b": 1.0}))
        log.on_event(evaluated(2))
    first, second, third = metrics(tmp_path)
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
            assert len(metrics(tmp_path)) == count
            assert whole.startswith(path.read_bytes())
            if not count:
                log.on_event(updated(1))
    assert [line["update"] for line in metrics(tmp_path)] == [1]


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
