"""The outputs of a command: files that are checked before any trial, an own stdout, and commands to suggest."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoaccum.errors import UsageError

if TYPE_CHECKING:
    from autoaccum.devices.explanation import MemoryReport
    from autoaccum.planning.plan_events import Event
    from autoaccum.planning.plan_record import Plan
    from autoaccum.reporting.page import Page

_WAYS_OUT = {
    "-o": "for the result on stdout, use --json",
    "--emit": "give a name that ends in .py",
    "--plot": "give a name that ends in .svg or .png",
    "--report": "give a name that ends in .html",
}


class Outputs:
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
        self._account: MemoryReport | None = None
        self.written: dict[str, Path] = {}

    def check(self, workload: str, world_size: int) -> None:
        """Refuse now what could not be written later.

        Args:
            workload: The reference of what is planned, which is never overwritten.
            world_size: As planned.

        Raises:
            UsageError: A file is there or cannot be written, two are the same or one is the workload, or its name or
                what is installed does not go together with what it is to hold.
        """
        from autoaccum.files import check_output
        from autoaccum.reporting.emit import check_emittable, module_name

        for option, file in self._asked.items():
            check_output(file, force=self._force, hint=_WAYS_OUT[option])
            check_apart(option, file, workload)
        check_names(self._asked)
        if "--emit" in self._asked:
            module_name(self._asked["--emit"])
            check_emittable(world_size=world_size)
        if "--plot" in self._asked:
            from autoaccum.reporting.figures.style import picture_format  # With matplotlib.

            picture_format(self._asked["--plot"])

    def listen(self, event: Event) -> None:
        """Keep what is drawn; before any trial, raise UsageError where the workload's step cannot be given out."""
        from autoaccum.planning.framework_arguments import check_framework
        from autoaccum.planning.plan_events import Explained, Inspected
        from autoaccum.planning.plan_messages import describe_workload
        from autoaccum.reporting.emit import check_emittable

        if isinstance(event, Inspected) and self._framework is not None:
            workload = describe_workload(event.inspection, "")
            check_framework(self._framework, workload, parallel=event.inspection.parallel)
        if isinstance(event, Inspected) and "--emit" in self._asked:
            seen = event.inspection
            joins = bool(seen.coupled or seen.joining)
            about: dict[str, Any] = {
                "batchnorm": seen.batchnorm,
                "savers": seen.savers,
                "multiple_of": seen.multiple_of,
            }
            check_emittable(recipe=seen.recipe, joins=joins, **about)
        elif isinstance(event, Explained):
            self._account = event.account

    def write(self, plan: Plan, seconds: float | None = None) -> None:
        """Write all of a plan, which took so many seconds, also where one fails; then raise the first error."""
        writers: dict[str, Callable[[Plan, Path], None]] = {
            "-o": lambda plan, file: plan.save(file, force=self._force),
            "--emit": self._write_step,
            "--plot": self._write_picture,
            "--report": partial(self._write_page, seconds=seconds),
        }
        failed: list[Exception] = []
        for option, file in self._asked.items():
            try:
                writers[option](plan, Path(file))
                self.written[option] = Path(file)
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _write_step(self, plan: Plan, file: Path) -> None:
        from autoaccum.files import write_text
        from autoaccum.reporting.emit import emit_wrapper, module_name

        write_text(file, emit_wrapper(plan, module=module_name(str(file))), force=self._force)

    def _write_picture(self, plan: Plan, file: Path) -> None:
        from autoaccum.files import write_bytes
        from autoaccum.reporting.figures.plan_figures import draw_memory
        from autoaccum.reporting.figures.style import picture_format

        write_bytes(file, draw_memory(plan, self._account, picture_format(str(file))), force=self._force)

    def _write_page(self, plan: Plan, file: Path, seconds: float | None) -> None:
        from autoaccum.reporting.plan_page import plan_page

        write_page(plan_page(plan, self._account, seconds), file, force=self._force)


def check_report(report: str | None, others: Mapping[str, str | None], *, force: bool) -> None:
    """Raise UsageError now for a page that could not be written later, or that names the file of another option."""
    from autoaccum.files import check_output

    if report is not None:
        check_output(report, force=force, hint=_WAYS_OUT["--report"])
        check_names({"--report": report, **{name: file for name, file in others.items() if file is not None}})


def write_page(page: Page, file: str | Path, *, force: bool, **about: Any) -> None:
    """Write a page with the command that makes it, in `running_words(**about)`."""
    from autoaccum.files import write_text

    write_text(Path(file), page.render(shlex.join(running_words(**about))), force=force)


def check_names(files: Mapping[str, str]) -> None:
    """Raise UsageError if two options name one file, or `--report` one that is no page."""
    for (one, file), (other, same) in combinations(files.items(), 2):
        if Path(file).resolve() == Path(same).resolve():
            raise UsageError(f"{one} and {other} both name {same}", hint="take two names")
    page = files.get("--report")
    if page is not None and Path(page).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"the page {page} is no .html file", hint=_WAYS_OUT["--report"])


def check_apart(option: str, file: str, workload: str) -> None:
    """Raise UsageError if `file`, which `option` names, is the workload's own source."""
    from autoaccum.sources.module_names import split_reference

    source, _, _ = split_reference(workload)
    sources = (Path(workload), Path(source), Path(f"{source.replace('.', '/')}.py"))
    if Path(file).resolve() in (path.resolve() for path in sources):
        raise UsageError(f"{option} names the workload itself, {file}", hint="choose another name")


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
        elif value is True and parameter.is_flag:  # type: ignore[attr-defined]
            words.append(parameter.opts[0])
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], _word(each)]
    return words


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
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
