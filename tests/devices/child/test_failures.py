from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoaccum.devices.child.failures import ChildDied, Failure, describe_failure
from autoaccum.devices.child_device import record_death
from autoaccum.devices.trial_run import slice_parts
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError

DEATH = ChildDied(Failure(outcome="error", message="its process died", fault="measurement"), signal=11)


@pytest.mark.parametrize(
    ("crashes_for_memory", "outcome", "fault"), [(False, "error", "measurement"), (True, "oom", None)]
)
def test_a_crash_of_native_code_may_be_for_lack_of_memory(
    crashes_for_memory: bool, outcome: str, fault: str | None
) -> None:
    trial = record_death((8, 8), DEATH, crashes_for_memory=crashes_for_memory)
    assert (trial.outcome, trial.fault, trial.is_definite_oom) == (outcome, fault, not crashes_for_memory)
    assert (trial.parts, trial.timed_out, trial.message) == ((8, 8), False, "its process died")


def raised(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def describe(error: BaseException) -> Failure:
    def fail() -> None:
        raise error

    return describe_failure(raised(fail), "micro-batch 8, forward", at="micro-batch 8, forward: ")


CUDA_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 23.57 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 5.00 GiB memory in use. 4.00 GiB allowed; Of the allocated memory "
    "3.80 GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(("requested", "shown"), [("20.00 MiB", "20.0 MiB"), ("1.50 GiB", "1.5 GiB")])
def test_a_refusal_of_a_cards_allocator_says_how_much_was_asked(requested: str, shown: str) -> None:
    failure = describe(torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY.format(requested)))
    assert (failure.outcome, failure.is_definite_oom, failure.fault) == ("oom", True, None)
    assert failure.message == (
        f"micro-batch 8, forward ran out of memory (OutOfMemoryError, which asked for {shown} more)"
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("CUDA error: device-side assert triggered", "user"),
        ("CUDA error: an illegal memory access was encountered", "user"),
        ("CUDA error: uncorrectable ECC error encountered", "measurement"),
        ("CUDA error: unspecified launch failure", "measurement"),
    ],
)
def test_a_dead_context_is_an_error_and_never_out_of_memory(text: str, fault: str) -> None:
    # It comes out at a line of ours as likely as at the user's.
    error = RuntimeError(f"{text}\nCUDA kernel errors might be asynchronously reported at some other API call")
    error.__cause__ = torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY)
    failure = describe(error)
    assert (failure.outcome, failure.fault) == ("error", fault)
    assert failure.message.startswith(f"micro-batch 8, forward broke the card's context ({text}): ")
    assert "CUDA_LAUNCH_BLOCKING=1" in failure.message
    assert "report it" not in failure.message


@pytest.mark.parametrize(
    ("error", "fault", "message"),
    [
        (ValueError("bad\nsecond line"), "user", "micro-batch 8, forward raised ValueError: bad"),
        (SystemExit(3), "user", "micro-batch 8, forward called sys.exit(3)"),
        (SystemExit(), "user", "micro-batch 8, forward called sys.exit()"),
        (KeyboardInterrupt(), "user", "micro-batch 8, forward raised KeyboardInterrupt"),
        (WorkloadError("seen", hint="way out"), "user", "micro-batch 8, forward: seen: way out"),
        (UsageError("bad flag"), "user", "micro-batch 8, forward: bad flag"),
        (NotMeasuredError("no"), "measurement", "micro-batch 8, forward: no"),
    ],
)
def test_blames_whom_it_concerns(error: BaseException, fault: str, message: str) -> None:
    failure = describe(error)
    assert (failure.outcome, failure.fault, failure.message) == ("error", fault, message)


def test_shows_the_users_frames() -> None:
    shown = describe(ValueError("bad")).traceback
    assert shown is not None
    assert "in fail" in shown
    assert "ValueError: bad" in shown


def test_a_bug_of_autoaccum_is_not_blamed_on_the_user() -> None:
    failure = describe_failure(raised(lambda: slice_parts(None, 3, ["x"])), "micro-batch 8, batch")  # type: ignore[list-item]
    assert failure.fault == "measurement"
    assert "please report" in failure.message
    assert failure.traceback is not None
    assert "slice_parts" in failure.traceback
