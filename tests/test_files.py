"""Files of results: written whole or not at all, and refused with the reason before hours are spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.errors import UsageError
from autoaccum.files import check_output, write_text


def test_never_overwrites_without_force(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine")
    for write in (check_output, lambda file: write_text(file, "new", force=False)):
        with pytest.raises(UsageError, match="exists already: add --force"):
            write(path)
    check_output(path, force=True)
    assert path.read_text() == "mine"
    write_text(path, "new", force=True)
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none/plan.json", "there is no folder"),
        ("file/plan.json", "cannot be written|there is no folder"),
        ("", "is a folder"),
        ("a" * 400, "cannot be written"),
        ("/dev/null", "is not a regular file"),
        ("/proc/plan.json", "cannot be written"),
    ],
)
def test_says_why_it_cannot_write(tmp_path: Path, name: str, text: str, force: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=text):
        check_output(tmp_path / name, force=force)
    with pytest.raises(UsageError, match=text):
        write_text(tmp_path / name, "new", force=force)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["", "-"])
def test_a_name_that_is_no_file(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is not the name of a file: for the plan on stdout, use --json"):
        check_output(name)


def test_writes_behind_a_symbolic_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new", force=True)
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    write_text(file, "old", force=False)
    file.chmod(0o750)
    write_text(file, "new", force=True)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o750)
