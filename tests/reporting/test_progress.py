from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from consoles import Terminal, console_on, told
from factories import change_facts, make_inspection

from autoaccum.devices.base import Trial
from autoaccum.messages import Message
from autoaccum.planning.plan_events import (
    Doing,
    Inspected,
    TrialFinished,
    TrialStarted,
)
from autoaccum.reporting import progress as progress_lines
from autoaccum.reporting.progress import PlanProgress
from autoaccum.units import GIB, MIB

INSPECTION = make_inspection(name="digits", parameters=1_234_567, precision="bf16")
OK = Trial(parts=(64, 64), outcome="ok", peak_reserved_bytes=312 * MIB, seconds=1.24)
OOM = Trial(parts=(128, 128), outcome="oom", phase="backward", seconds=0.5, peak_reserved_bytes=500 * MIB)
PROOF = Trial(parts=(43, 42), outcome="ok", peak_allocated_bytes=200 * MIB, seconds=1.0, fresh=True)


def draw(*, terminal: bool = False, quiet: bool = False) -> str:
    file = Terminal() if terminal else io.StringIO()
    with PlanProgress(console_on(file, 40), quiet=quiet) as progress:
        progress.notify(Doing("loading", "digits.py"))
        progress.notify(Inspected(INSPECTION, "cpu", GIB, 256))
        for number, trial in enumerate((OK, OOM), start=1):
            progress.notify(TrialStarted(number, trial.parts))
            progress.print_output(f"printed in trial {number}")
            progress.notify(TrialFinished(number, trial))
        progress.notify(TrialStarted(3, PROOF.parts))
        progress.notify(TrialFinished(3, PROOF))
    return file.getvalue()


def test_one_line_per_trial() -> None:
    assert draw() == (
        "digits: Net, 1,234,567 parameters, bf16, AdamW; on cpu with 1.0 GiB, sizes up to 256\n"
        "micro-batch  outcome       peak      time\n"
        "printed in trial 1\n"
        "         64  ok         312 MiB     1.2 s\n"
        "printed in trial 2\n"
        "        128  oom              -     0.5 s  in backward\n"
        "    43 + 42  ok         200 MiB     1.0 s  from a clean state\n"
    )


@pytest.mark.parametrize(
    ("dtypes", "precision", "words"),
    [
        (("fp32",), "fp32", "parameters, fp32, AdamW"),
        (("bf16",), "fp32", "parameters in bf16, no autocast, AdamW"),
        (("bf16", "fp32"), "fp16", "parameters in bf16 and fp32, autocast to fp16, AdamW"),
    ],
)
def test_the_dtype_of_parameters_is_theirs(dtypes: tuple[str, ...], precision: str, words: str) -> None:
    seen = change_facts(INSPECTION, dtypes=dtypes, precision=precision)
    assert words in told(PlanProgress, Inspected(seen, "cpu", GIB, 256))


def test_what_is_predicted_is_said_to_be_so() -> None:
    seen = replace(INSPECTION, cautions=(Message("compiled"),))
    inspected = Inspected(seen, "rtx3090 (simulated)", GIB, 256, predicted=True)
    trials = TrialStarted(1, OOM.parts), TrialFinished(1, OOM), TrialStarted(2, PROOF.parts), TrialFinished(2, PROOF)
    text = told(PlanProgress, inspected, Doing("tracing"), *trials, terminal=True, width=80)
    assert "AdamW; predicted for rtx3090 (simulated) with 1.0 GiB, sizes up to 256\nwarning: the model is" in text
    assert "tracing small sizes ..." in text
    assert "predicting micro-batch 128 ..." in text
    assert "        128  no fit     500 MiB     0.5 s  in backward\n" in text
    assert "    43 + 42  ok         200 MiB     1.0 s  confirmed by its own trace\n" in text


def test_quiet_passes_on_only_what_the_workload_prints() -> None:
    assert draw(quiet=True) == "printed in trial 1\nprinted in trial 2\n"


def test_a_terminal_shows_the_trial_that_runs() -> None:
    text = draw(terminal=True)
    assert "loading digits.py ..." in text
    assert "trial 2: micro-batch 128 ..." in text
    assert "trial 3: micro-batch 43 + 42 ..." in text
    assert text.endswith("\x1b[?25h") or text.rstrip().endswith("clean state"), "the cursor is shown again"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_what_lasts_is_printed_now_and_then(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "LINE_SECONDS", 0.02)
    file = io.StringIO()
    with PlanProgress(console_on(file, 40), quiet=quiet) as progress:
        progress.notify(Doing("tracing"))
        ends = time.monotonic() + (0.2 if quiet else 20)
        while file.getvalue().count("\n") < 2 and time.monotonic() < ends:
            time.sleep(0.01)
    lines = file.getvalue().splitlines()
    assert lines == [] if quiet else all(line.startswith("tracing small sizes ... 0 s") for line in lines[:2])
    assert quiet or len(lines) >= 2


def test_what_each_process_of_a_workload_prints_is_printed_once() -> None:
    """Trials load the workload again: bars and reports of libraries once came back with each of them."""
    file = io.StringIO()
    with PlanProgress(console_on(file, 40)) as progress:
        for rate in ("96.1it/s", "101.33it/s"):
            progress.print_output("Some weights are new")
            progress.print_output(f"\rLoading: 0%| | 0/3\rLoading: 100%|###| 3/3 [00:00<00:00, {rate}]")
            progress.print_output(f"step took {rate}\r")
    assert file.getvalue().splitlines() == [
        "Some weights are new",
        "Loading: 100%|###| 3/3 [00:00<00:00, 96.1it/s]",
        "step took 96.1it/s",
        "step took 101.33it/s",
    ]
