from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoaccum.devices.diagnosis import describe_failure
from autoaccum.devices.recording import Failure
from autoaccum.devices.rehearsal import take_parts
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError


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


def test_a_refusal_of_the_cpu_allocator_says_how_much_was_asked() -> None:
    failure = describe_failure(raised(lambda: torch.empty(2**60, dtype=torch.uint8)), "micro-batch 8, forward")
    assert failure.outcome == "oom"
    assert failure.certain
    assert failure.blames is None
    assert failure.message.startswith("micro-batch 8, forward ran out of memory (")
    assert "asked for 1048576.0 TiB more" in failure.message


CUDA_SHORTAGE = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 23.57 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 5.00 GiB memory in use. 4.00 GiB allowed; Of the allocated memory "
    "3.80 GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("asked", "told"), [("20.00 MiB", "20.0 MiB"), ("1.50 GiB", "1.5 GiB"), ("2.00 KiB", "2.0 KiB")]
)
def test_a_refusal_of_a_cards_allocator_says_how_much_was_asked(asked: str, told: str) -> None:
    failure = describe(torch.OutOfMemoryError(CUDA_SHORTAGE.format(asked)))
    assert (failure.outcome, failure.certain, failure.blames) == ("oom", True, None)
    assert failure.message == (
        f"micro-batch 8, forward ran out of memory (OutOfMemoryError, which asked for {told} more)"
    )


@pytest.mark.parametrize(
    ("text", "blames"),
    [
        ("CUDA error: device-side assert triggered", "user"),
        ("CUDA error: an illegal memory access was encountered", "user"),
        ("CUDA error: uncorrectable ECC error encountered", "measurement"),
        ("CUDA error: unspecified launch failure", "measurement"),
    ],
)
def test_a_dead_context_is_an_error_and_never_a_shortage(text: str, blames: str) -> None:
    # It comes out at a line of ours as likely as at the user's.
    error = RuntimeError(f"{text}\nCUDA kernel errors might be asynchronously reported at some other API call")
    error.__cause__ = torch.OutOfMemoryError(CUDA_SHORTAGE)
    failure = describe(error)
    assert (failure.outcome, failure.blames) == ("error", blames)
    assert failure.message.startswith(f"micro-batch 8, forward broke the card's context ({text}): ")
    assert "CUDA_LAUNCH_BLOCKING=1" in failure.message
    assert "report it" not in failure.message


@pytest.mark.parametrize(
    ("error", "blames", "message"),
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
def test_blames_whom_it_concerns(error: BaseException, blames: str, message: str) -> None:
    failure = describe(error)
    assert (failure.outcome, failure.blames, failure.message) == ("error", blames, message)


def test_shows_the_users_frames() -> None:
    shown = describe(ValueError("bad")).traceback
    assert shown is not None
    assert "in fail" in shown
    assert "ValueError: bad" in shown


def test_a_bug_of_autoaccum_is_not_blamed_on_the_user() -> None:
    failure = describe_failure(raised(lambda: take_parts(None, 3, ["x"])), "micro-batch 8, batch")  # type: ignore[list-item]
    assert failure.blames == "measurement"
    assert "please report" in failure.message
    assert failure.traceback is not None
    assert "take_parts" in failure.traceback
