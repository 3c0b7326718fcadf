"""The command `autoaccum`: loads its subcommands when they are called, and turns errors into exit codes."""

from __future__ import annotations

import errno
import io
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
from autoaccum.checks import did_you_mean
from autoaccum.cli.flags import RENAMED_FLAGS, HelpWithHeadings
from autoaccum.errors import AutoaccumError, UsageError

_COMMANDS = ("plan", "compare", "verify", "fit", "tune", "guard", "explain", "measure", "gpus", "doctor")
_CODE_INTERRUPTED = 128 + signal.SIGINT
_CODE_BROKEN_PIPE = 128 + 13
_CODE_OUR_BUG = 3
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing stdout: those of files have messages of their own."""


class Root(HelpWithHeadings, click.Group):
    """A group whose commands are modules of this package, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"autoaccum.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command by the first word; raise UsageError if that is nearly one."""
        guess = did_you_mean(args[0], _COMMANDS)
        if guess and args[0] not in _COMMANDS:
            raise UsageError(f"no such command {args[0]!r}", hint=guess)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **options: Any) -> Any:
        """Run a command and leave with its exit code."""
        words = list(sys.argv[1:] if args is None else args)
        asked = f"autoaccum {words[0]}" if words and words[0] in _COMMANDS else "autoaccum"
        sys.exit(_guarded(lambda: self._run(words or ["--help"]), asked))

    def _run(self, words: list[str]) -> None:
        with self.make_context("autoaccum", words) as context:
            self.invoke(context)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(autoaccum.__version__, prog_name="autoaccum", message="%(prog)s %(version)s")
def main() -> None:
    """Train with the batch you want on the memory you have.

    `plan` finds the largest micro-batch that really fits, by running it or by simulating a card, and how many of them
    make up the batch. `fit` trains with them, and every update equals the full batch's.

    Defaults for a project, such as its card and target batch, go into pyproject.toml, under `[tool.autoaccum]`.

    Examples:
      autoaccum plan --gpu rtx4090 -- python train.py --batch-size={micro_batch}
      autoaccum plan examples/gpt2.py --target-batch 256 --gpu rtx4090
      autoaccum COMMAND --help  what a command does, its flags, exit codes and examples
    """


def _guarded(run: Callable[[], None], asked: str) -> Any:
    """Run a command; an exception becomes a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A terminal may lack a character.
    try:
        with _ending_by_exception():
            run()
            if sys.stdout is not None:  # Python was started without one.
                sys.stdout.flush()
    except AutoaccumError as error:
        return _report(error)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        return _report(_usage_error(error, asked))
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted: no file was written")
        return _CODE_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return _CODE_BROKEN_PIPE
    except SystemExit as leaving:
        return leaving.code
    except Exception as error:
        return _report_unforeseen(error)
    return 0


def _report_unforeseen(error: Exception) -> int:
    """Report a stdout that cannot be written as the user's, and any other exception as a fault of autoaccum."""
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        _silence_stdout()
        return _report(UsageError(f"stdout cannot be written ({error.strerror})", hint="send it to another place"))
    import traceback

    _say("".join(traceback.format_exception(error)).rstrip())
    _say("error: this is a fault of autoaccum, not of your workload: please report it with the lines above")
    return _CODE_OUR_BUG


def _report(error: AutoaccumError) -> int:
    from autoaccum.reporting.console import make_console, print_error

    with suppress(OSError):
        print_error(make_console(stderr=True), error)
    return error.exit_code


def _say(text: str) -> None:
    with suppress(OSError):
        click.echo(text, err=True)


def _usage_error(error: click.ClickException, asked: str) -> UsageError:
    text = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else asked
    if isinstance(error, click.NoSuchOption) and context is not None:
        taken = {flag for parameter in context.command.params for flag in parameter.opts}
        renamed = RENAMED_FLAGS.get(error.option_name, "")
        if taken & set(renamed.split()):
            return UsageError(f"{error.option_name} is now {renamed}", hint=f"see `{command} --help`")
    return UsageError(text[:1].lower() + text[1:], hint=f"see `{command} --help`")


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Leave by an exception on SIGTERM and SIGHUP, so that children are ended on the way out; nohup(1) stays obeyed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    previous = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}

    def leave(number: int, frame: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in previous:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _silence_stdout() -> None:
    """Keep Python from flushing into what cannot be written once more when it leaves."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
