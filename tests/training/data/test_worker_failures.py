from __future__ import annotations

import os

import pytest

from autoaccum.training.data.worker_failures import explain_failed_start, explain_worker_failure

MESSAGES = {
    "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out of"
    " shared memory. Please try to raise your shared memory limit.": "give /dev/shm more space",
    "unable to write to file </torch_12_3>: No space left on device (28)": "give /dev/shm more space",
    "unable to mmap 400 bytes from file </torch_12_3>: Cannot allocate memory (12)": "give /dev/shm more space",
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nRuntimeError:"
    " unable to write to file </torch_12_3>: No space left on device (28)": "(RuntimeError: unable to write to file <",
    "DataLoader worker (pid(s) 12, 13) exited unexpectedly": "set workers to 0",
    "Too many open files. Communication with the workers is no longer possible. Please increase the limit using"
    " `ulimit -n` in the shell or change the sharing strategy": "(Too many open files): raise the limit (`ulimit",
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nRuntimeError:"
    " unable to open shared memory object </torch_12_3> in read-write mode: Too many open files (24)": "raise the",
    "DataLoader timed out after 5 seconds": "give the DataLoader a longer timeout",
}


@pytest.mark.parametrize("text", MESSAGES)
def test_knows_what_torch_says(text: str) -> None:
    explained = explain_worker_failure(RuntimeError(text))
    assert explained is not None
    assert MESSAGES[text] in str(explained)


def test_knows_why_processes_cannot_be_started() -> None:
    for number, way in {24: "raise the limit (`ulimit -n 4096`)", 11: "use fewer workers", 12: "use fewer"}.items():
        explained = explain_failed_start(OSError(number, os.strerror(number)))
        assert explained is not None
        assert os.strerror(number) in explained.message
        assert way in str(explained)


def test_other_errors_are_the_users() -> None:
    assert explain_worker_failure(RuntimeError("shape mismatch")) is None
    assert explain_worker_failure(OSError(2, "No such file")) is None
    assert explain_worker_failure(OSError(24, "Too many open files")) is None
    assert explain_failed_start(FileNotFoundError(2, "No such file")) is None
    assert explain_worker_failure(OSError(28, "No space left on device")) is None
    told = "Caught RuntimeError in DataLoader worker process 0.\nDataLoader worker (pid 3) exited unexpectedly"
    assert explain_worker_failure(RuntimeError(told)) is None
