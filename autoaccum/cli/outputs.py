"""The outputs of a command: files that are checked before any trial, an own stdout, and commands to suggest."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoaccum.errors import UsageError

if TYPE_CHECKING:
    from autoaccum.devices.explanation import MemoryReport
    from autoaccum.planning.plan_events import Event
    from autoaccum.planning.plan_record import Plan
    from autoaccum.reporting.console import Block

_WAYS_OUT = {
    "-o": "for the result on stdout, use --json",
    "--emit": "give a name that ends in .py",
    "--plot": "give a name that ends in .svg or .png",
    "--report": "give a name that ends in .html",
}


def check_files(
    files: Mapping[str, str | None],
    *,
    force: bool,
    workload: str | None = None,
    others: Mapping[str, Path] | None = None,
) -> None:
    """Refuse now files that could not be written later, or must not be.

    Args:
        files: The file of each option; None: none.
        force: Overwrite what is there, but never the workload or `others`.
        workload: The reference of the workload.
        others: Other files, by what they are.

    Raises:
        UsageError: One is there or cannot be written, or is the workload or another of these files.
    """
    from autoaccum.files import check_output
    from autoaccum.sources.source import FileSource

    taken = dict(others or {})
    if workload is not None:
        taken["the workload itself"] = Path(FileSource(workload).file)
    for option, file in files.items():
        if file is None:
            continue
        for what, path in taken.items():
            if Path(file).resolve() == path.resolve():
                raise UsageError(f"{option} names {what}, {file}", hint="choose another name")
        check_output(file, force=force, hint=_WAYS_OUT[option])
        if option == "--plot":
            from autoaccum.reporting.figures import picture_format  # With matplotlib.

            picture_format(file)
        taken[f"the file of {option}"] = Path(file)


class PlanFiles:
    """The files that `autoaccum plan` writes.

    Args:
        files: The file of each option; None: none.
        framework: The framework whose arguments the plan is to have; None: none.
        force: Overwrite what is there.

    Attributes:
        written: The files that are there now, by option.
    """

    def __init__(self, files: Mapping[str, str | None], *, framework: str | None = None, force: bool) -> None:
        self._asked = {option: file for option, file in files.items() if file is not None}
        self._framework, self._force = framework, force
        self._memory: MemoryReport | None = None
        self.written: dict[str, Path] = {}

    def check(self, workload: str, world_size: int) -> None:
        """Refuse now what could not be written later, as `check_files`, or of a plan for so many ranks.

        Raises:
            UsageError: As from `check_files`, or the name of a file does not go together with what it is to hold.
        """
        from autoaccum.reporting.emit import check_emittable, module_name
        from autoaccum.spec import TrainingSpec

        check_files(self._asked, force=self._force, workload=workload)
        if "--emit" in self._asked:
            module_name(self._asked["--emit"])
            check_emittable(TrainingSpec(), world_size=world_size)

    def listen(self, event: Event) -> None:
        """Keep what is drawn; before any trial, raise UsageError where the workload's step cannot be given out."""
        from autoaccum.integrations.arguments_from_plan import check_framework
        from autoaccum.planning.plan_events import Explained, Inspected
        from autoaccum.reporting.emit import check_emittable

        if isinstance(event, Explained):
            self._memory = event.report
        if not isinstance(event, Inspected):
            return
        seen = event.inspection
        if self._framework is not None:
            check_framework(self._framework, seen.spec, seen.workload, parallel=seen.parallel)
        if "--emit" in self._asked:
            check_emittable(seen.spec, seen.workload)

    def write(self, plan: Plan, seconds: float | None = None) -> None:
        """Write all of a plan, which took so many seconds, also where one fails; then raise the first error."""
        failed: list[Exception] = []
        for option, name in self._asked.items():
            try:
                self._write(option, plan, Path(name), seconds)
                self.written[option] = Path(name)
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _write(self, option: str, plan: Plan, file: Path, seconds: float | None) -> None:
        from autoaccum.files import write_bytes

        if option == "-o":
            content = plan.to_json().encode()
        elif option == "--emit":
            from autoaccum.reporting.emit import emit_wrapper, module_name

            content = emit_wrapper(plan, module=module_name(str(file))).encode()
        elif option == "--plot":
            from autoaccum.reporting.figures import draw_memory, picture_format

            content = draw_memory(plan, self._memory, picture_format(str(file)))
        else:
            from autoaccum.reporting.page import plan_page

            content = plan_page(plan, self._memory, seconds, shlex.join(running_words())).encode()
        write_bytes(file, content, force=self._force)


def write_page(
    file: str, title: str, sections: Mapping[str, Sequence[Block]], *, made_of: Sequence[Any] = (), force: bool
) -> None:
    """Write what a command shows as a page, with the words and numbers of the records that it is made of."""
    from autoaccum.files import write_text
    from autoaccum.reporting.page import made_with, render_page

    kind = click.get_current_context().command.name or ""
    sections = {**sections, "Made with": [made_with(*made_of)]}
    write_text(Path(file), render_page(kind, title, sections, shlex.join(running_words())), force=force)


def running_words(*, without: Collection[str] = (), instead: Mapping[str, Any] | None = None) -> list[str]:
    """Return the words of the running command line in order, `without` some parameters, `instead` with other values."""
    context = click.get_current_context()
    words = [*_program(), context.command.name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in without:
            continue
        value = (instead or {}).get(name, context.params[name])
        if isinstance(parameter, click.Argument):
            words.append(f"./{value}" if value.startswith("-") else value)
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], _word(each)]
    return words


def _word(value: Any) -> str:
    if isinstance(value, range):
        return f"{value[0]}..{value[-1]}"
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
