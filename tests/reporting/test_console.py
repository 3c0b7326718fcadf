from __future__ import annotations

import ast
import errno
import io

import pytest
from rich.text import Text

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.reporting.console import Facts, NotebookConsole, Table, make_console, print_error, show


class Broken(io.StringIO):
    """A file that cannot be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_result_that_cannot_be_written_is_the_callers_to_handle(error: OSError) -> None:
    with pytest.raises(type(error)):
        make_console(file=Broken(error)).print("result")


def test_progress_that_cannot_be_written_is_none() -> None:
    console = make_console(file=Broken(OSError(errno.ENOSPC, "No space left on device")), stderr=True)
    console.print("progress")
    console.print("progress")


@pytest.mark.parametrize("columns", ["0", "-1", "", "x", "1"])
def test_no_width_leaves_nothing_out(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    make_console(file=file).print("micro-batch  7", soft_wrap=True)
    assert file.getvalue() == "micro-batch  7\n"


def test_an_error_is_one_line() -> None:
    file = io.StringIO()
    print_error(make_console(file=file, width=20), UsageError("a long message " * 9, hint="[way] out"))
    assert file.getvalue() == f"error: {'a long message ' * 9}: [way] out\n"


def test_a_users_traceback_comes_first() -> None:
    file = io.StringIO()
    shown = 'Traceback (most recent call last):\n  File "model.py", line 3\nKeyError: 3\n'
    print_error(make_console(file=file), WorkloadError("model() raised KeyError", user_traceback=shown))
    assert file.getvalue() == f"{shown}error: model() raised KeyError\n"


ODD = "a\x1b[31mb\x9b2J\u202ec"
SHOWN = r"a\x1b[31mb\x9b2J\u202ec"


def test_control_characters_in_names_are_shown_and_do_not_reach_the_terminal() -> None:
    file = io.StringIO()
    console = make_console(file=file, width=200, force_terminal=True, color_system="standard")
    print_error(console, WorkloadError(f"there is no file {ODD}", user_traceback=f"File {ODD}\n\traised"))
    console.print(f"update 1  {ODD} 0.5")
    table = Table("name")
    table.add(ODD)
    show(console, table, Facts([("where", Text(f"{ODD}.weight", "yellow"))]))
    text = file.getvalue()
    assert text.count(SHOWN) == 5
    assert "\x9b" not in text
    assert "\u202e" not in text
    assert "\x1b[31mb" not in text
    assert "\x1b[1;31merror:" in text, "its own colours stay"


def test_a_notebook_has_one_output_that_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a kernel, IPython prints what it would send."""
    console = NotebookConsole(highlight=False)
    console.show_live("live")
    for number in range(101):
        console.print(f"line {number}", soft_wrap=True)
    console.show_live("")
    sent = [ast.literal_eval(line)["text/plain"] for line in capsys.readouterr().out.splitlines()]
    assert sent[:3] == ["live", "line 0\nlive", "line 0\nline 1\nlive"]
    assert sent[100].splitlines() == [f"line {number}" for number in range(100)], "it is full"
    assert sent[101:] == ["line 100\nlive", "line 100\n"]
