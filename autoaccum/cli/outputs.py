"""What becomes of the result of a command: shown, or JSON on stdout, and in files; and commands to suggest."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
from click.core import ParameterSource

from autoaccum.cli.flags import OUTPUT_FLAGS
from autoaccum.errors import UsageError
from autoaccum.reporting.console import make_console, show, written_lines

if TYPE_CHECKING:
    from autoaccum.reporting.console import Block
    from autoaccum.reporting.page import Picture

CODE_INTERRUPTED = 130

Contents: TypeAlias = "Mapping[str, Callable[[str], str | bytes]]"

_FILES: Final = {
    "-o": ("output", "for the result on stdout, use --json"),
    "--emit": ("emit", "give a name that ends in .py"),
    "--plot": ("plot", "give a name that ends in .svg or .png"),
    "--report": ("report", "give a name that ends in .html"),
    "--write-workload": ("write_workload", "give a name that ends in .py"),
}
"""The parameter of each option that names a file, and what to do where that is none."""


class Outputs:
    """What becomes of the result of a command; made before any trial, as it refuses files that cannot be written.

    Args:
        asked: The parameters of the command; those on its output are taken out.
        workload: The reference of the workload, or the words of a command.
        others: Other files that are never overwritten, by what they are.

    Attributes:
        files: The file of each option that was given.
        written: Those that are there now.
        force: Overwrite what is there, but never the workload or `others`.

    Raises:
        UsageError: A file is there or cannot be written, or is the workload or another of these files.
    """

    def __init__(
        self,
        asked: dict[str, Any],
        workload: str | tuple[str, ...] | None = None,
        others: Mapping[str, Path] | None = None,
    ) -> None:
        given = {name: asked.pop(name, None) for name in OUTPUT_FLAGS}
        self.as_json, self.quiet, self.verbose = bool(given["as_json"]), bool(given["quiet"]), bool(given["verbose"])
        self.force = bool(given["force"])
        self.files: dict[str, str] = {
            option: given[name] for option, (name, _) in _FILES.items() if given[name] is not None
        }
        self.written: dict[str, Path] = {}
        if self.files:
            self._check(workload, dict(others or {}))

    def _check(self, workload: str | tuple[str, ...] | None, taken: dict[str, Path]) -> None:
        from autoaccum.files import check_output
        from autoaccum.sources.source import find_source

        if isinstance(workload, str):
            taken["the workload itself"] = Path(find_source(workload).file)
        for option, file in self.files.items():
            for what, path in taken.items():
                if Path(file).resolve() == path.resolve():
                    raise UsageError(f"{option} names {what}, {file}", hint="choose another name")
            check_output(file, force=self.force, hint=_FILES[option][1])
            if option == "--plot":
                from autoaccum.reporting.figures import picture_format  # With matplotlib.

                picture_format(file)
            taken[f"the file of {option}"] = Path(file)

    def write(self, files: Contents) -> None:
        """Write the files that were asked for, also where one fails; then raise the first error.

        Args:
            files: By option, what makes the content of its file, from the name of that.
        """
        from autoaccum.files import write_bytes

        failed: list[Exception] = []
        for option, make in files.items():
            if option not in self.files:
                continue
            path = Path(self.files[option])
            try:
                content = make(self.files[option])
                write_bytes(path, content.encode() if isinstance(content, str) else content, force=self.force)
                self.written[option] = path
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def show(
        self,
        record: Callable[[], Any],
        blocks: Callable[[], Iterable[Block]],
        *,
        files: Contents | None = None,
        below: Callable[[], Iterable[Block]] = list,
        apart: bool = False,
    ) -> None:
        """Write files and show a result, also where it cannot be kept: it took its time.

        Args:
            record: Makes the JSON, or the plain values for it.
            blocks: Makes what a person reads, once the files are written.
            files: As for `write`.
            below: Makes what stands below the lines on files.
            apart: Leave a line between the progress and the result.
        """
        try:
            self.write(files or {})
        finally:
            if self.as_json:
                text = record()
                text = text if isinstance(text, str) else json.dumps(text, indent=2, allow_nan=False) + "\n"
                click.echo(text, nl=False)
            else:
                if apart and not self.quiet:
                    make_console(stderr=True).print()
                show(make_console(), *blocks(), *written_lines(self.written), *below())


def page(
    title: str, sections: Mapping[str, Sequence[Block | Picture]], made_of: Sequence[Any] = (), *, about: str = ""
) -> str:
    """Return what a command shows as a page, with the words and numbers of the records that it is made of."""
    from autoaccum.reporting.page import made_with, render_page

    kind = f"{click.get_current_context().command.name}{about}"
    return render_page(kind, title, {**sections, "Made with": [made_with(*made_of)]}, shlex.join(running_words()))


def running_words(
    *, without: Collection[str] = (), instead: Mapping[str, Any] | None = None, further: Sequence[str] = ()
) -> list[str]:
    """Return the words of the running command line in order, `without` some parameters, `instead` with other values.

    `further` words stand last, but before a training command.
    """
    context = click.get_current_context()
    words, command = [*_program(), context.command.name or ""], list[str]()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in without:
            continue
        value = (instead or {}).get(name, context.params[name])
        if isinstance(parameter, click.Argument) and isinstance(value, tuple):
            command = ["--", *value]
        elif isinstance(parameter, click.Argument):
            words.append(f"./{value}" if value.startswith("-") else value)
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            value = tuple(f"{key}={_word(item)}" for key, item in value.items()) if isinstance(value, dict) else value
            for part in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], _word(part)]
    return [*words, *further, *command]


def _word(value: Any) -> str:
    if isinstance(value, range):
        return f"{value[0]}..{value[-1]}" + (f":{value.step}" if value.step > 1 else "")
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _program() -> list[str]:
    """Return how this program was called, so that suggested commands can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "autoaccum":
        return [sys.executable, "-m", "autoaccum"]
    return [sys.argv[0]] if called.name == "autoaccum" and shutil.which("autoaccum") is None else ["autoaccum"]


@contextmanager
def stdout_kept() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Send everything that the workload prints to stderr: stdout is for the result of the command.

    Yields a context of the command's own, within which stdout is what it was.
    """
    kept, own = os.dup(1), sys.stdout

    @contextmanager
    def given_back() -> Iterator[None]:
        _flush_stdout()
        os.dup2(kept, 1)
        with redirect_stdout(own):
            yield
            _flush_stdout()
        os.dup2(2, 1)

    try:
        _flush_stdout()
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield given_back
    finally:
        _flush_stdout()
        os.dup2(kept, 1)
        os.close(kept)


def _flush_stdout() -> None:
    with suppress(OSError, ValueError, AttributeError):  # Closed, full, or never there.
        sys.stdout.flush()
