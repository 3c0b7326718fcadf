from __future__ import annotations

import subprocess
import sys

import click
import pytest
from command_line import invoke

from autoaccum.cli import root
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> type[click.Command]:
    """Make every command raise an exception of the test's choice."""

    class Raising(click.Command):
        error: BaseException = RuntimeError()

        def invoke(self, ctx: click.Context) -> None:
            click.echo("half a result", err=True)
            raise type(self).error

    monkeypatch.setattr(root.Root, "get_command", lambda *_: Raising("plan"))
    return Raising


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("seen", hint="way out"), 2, "error: seen: way out\n"),
        (WorkloadError("model() raised", user_traceback="File model.py"), 2, "File model.py\nerror: model() raised\n"),
        (DoesNotFitError("micro-batch 1 needs 2 GiB"), 1, "error: micro-batch 1 needs 2 GiB\n"),
        (NotMeasuredError("hung"), 3, "error: hung\n"),
        (AutoaccumError("odd"), 3, "error: odd\n"),
        (KeyboardInterrupt(), 130, "interrupted: no file was written"),
        (click.Abort(), 130, "interrupted: no file was written"),
        (BrokenPipeError(), 141, "half a result\n"),
        (SystemExit(143), 143, "half a result\n"),
        (click.UsageError("No such option."), 2, "error: no such option: see `autoaccum plan --help`\n"),
        (ZeroDivisionError("ours"), 3, "error: this is a fault of autoaccum"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_become_exit_codes(raising: type[click.Command], error: BaseException, code: int, text: str) -> None:
    raising.error = error  # type: ignore[attr-defined]
    result = invoke("plan")
    assert result.exit_code == code
    assert result.stdout == ""
    assert text in result.stderr
    assert ("Traceback" in result.stderr) == isinstance(error, ZeroDivisionError)


def test_help() -> None:
    shown = {invoke(*words).stdout for words in ((), ("--help",), ("-h",))}
    assert len(shown) == 1
    assert "Usage: autoaccum [OPTIONS] COMMAND" in shown.pop()


def test_a_reader_that_went_away_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "autoaccum", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_a_full_disk_is_an_error_of_stdout_and_silences_stderr() -> None:
    told = "error: stdout cannot be written (No space left on device): send it to another place\n"
    for words, stderr in (("--version >/dev/full", told), ("plan nowhere.py --target-batch 0 2>/dev/full", "")):
        command = f'"{sys.executable}" -m autoaccum {words}'
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (2, stderr)


def test_answers_of_the_command_line_load_nothing_heavy() -> None:
    words = ["--help", "plan --help", "fit --help", "tune --help", "--version", "plan m.py", "guard m.py --gpu t4"]
    code = (
        "import sys\nfrom autoaccum.cli import main\n"
        f"for words in {words!r}:\n"
        "    try: main(words.split())\n"
        "    except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'optuna', 'pynvml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
