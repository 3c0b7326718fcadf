"""`autoaccum`: its commands, loaded when they are called, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

import click

import autoaccum
from autoaccum.errors import AutoaccumError, UsageError

_COMMANDS = ("plan",)
_CODE_INTERRUPTED = 128 + signal.SIGINT
_CODE_TERMINATED = 128 + signal.SIGTERM
_CODE_BROKEN_PIPE = 128 + 13
_CODE_OUR_BUG = 3


class Root(click.Group):
    """A group whose commands are modules of this package, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of that name."""
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"autoaccum.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **options: Any) -> Any:
        """Run a command and leave with its exit code."""
        words = list(sys.argv[1:] if args is None else args)
        sys.exit(_guarded(lambda: self._run(words or ["--help"])))

    def _run(self, words: list[str]) -> None:
        with self.make_context("autoaccum", words) as context:
            self.invoke(context)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autoaccum.__version__, prog_name="autoaccum", message="%(prog)s %(version)s")
def main() -> None:
    """Train with the batch you want on the memory you have.

    Finds the largest micro-batch that really fits, by running it, and how many of them make up the batch.
    """


def _guarded(run: Callable[[], None]) -> int:
    """Run a command; what it raises becomes a message and an exit code."""
    try:
        with _ending_on_sigterm():
            run()
            sys.stdout.flush()
    except AutoaccumError as error:
        return _report(error)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        return _report(_usage_error(error))
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted", "the trials were ended, nothing was written")
        return _CODE_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return _CODE_BROKEN_PIPE
    except Exception:
        import traceback

        traceback.print_exc()
        _say("error", "this is a fault of autoaccum, not of your workload: please report it with the lines above")
        return _CODE_OUR_BUG
    return 0


def _report(error: AutoaccumError) -> int:
    from autoaccum.reporting.consoles import make_console
    from autoaccum.reporting.errors import print_error

    with suppress(BrokenPipeError):
        print_error(make_console(stderr=True), error)
    return error.exit_code


def _say(label: str, text: str) -> None:
    with suppress(OSError):
        click.echo(f"{label}: {text}", err=True)


def _usage_error(error: click.ClickException) -> UsageError:
    """What click found wrong, in our words: seen, bound, way out."""
    text = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "autoaccum"
    return UsageError(text[:1].lower() + text[1:], hint=f"see `{command} --help`")


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Leave by an exception on SIGTERM, so that children are ended on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(_CODE_TERMINATED)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _silence_stdout() -> None:
    """Keep Python from flushing into the closed pipe once more when it leaves."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
