from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.errors import UsageError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.asked.project import Project, find_project
from autoaccum.guarding.asked.tolerance import Tolerance

WHOLE = """
[project]
name = "anything"

[tool.autoaccum]
tolerance = "0.5%"
lock = "locks/memory.lock"

[[tool.autoaccum.guard]]
workload = "./src/../train.py:small"
gpu = ["rtx3090", "a100-80gb"]
target-batch = 256
precision = ["bf16", "fp32"]

[[tool.autoaccum.guard]]
workload = "package.module:name"
device = "cpu"
micro-batch = 8
keeps = ["ema"]
world-size = 2
equal = true
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sub/deep").mkdir(parents=True)
    return tmp_path


def test_all_that_a_project_says(project: Path) -> None:
    (project / "pyproject.toml").write_text(WHOLE)
    for cwd in (project, project / "sub/deep"):
        found = find_project(cwd)
        assert (found.folder, found.lock) == (project, project / "locks/memory.lock")
        assert found.tolerance == Tolerance(fraction=0.005)
        assert [case_name(case) for case in found.cases] == [
            "train.py:small on rtx3090, target 256, bf16",
            "train.py:small on rtx3090, target 256, fp32",
            "train.py:small on a100-80gb, target 256, bf16",
            "train.py:small on a100-80gb, target 256, fp32",
            "package.module:name on cpu, micro-batch 8, 2 ranks, equal parts, keeps ema",
        ]
    other = find_project(project / "sub", "other.lock")
    assert (other.lock, other.options) == (project / "sub/other.lock", ("--lock", "other.lock"))
    assert other.cases == find_project(project).cases
    assert find_project(project / "sub", "/tmp/other.lock").lock == Path("/tmp/other.lock")


def test_the_nearest_table_counts_then_the_nearest_lock_then_the_folder_itself(project: Path) -> None:
    below, deep = project / "sub", project / "sub/deep"
    assert find_project(deep) == Project(folder=deep, lock=deep / "autoaccum.lock")
    (project / "autoaccum.lock").write_text("")
    (deep / "pyproject.toml").write_text('[project]\nname = "none of ours"\n')
    assert find_project(deep).folder == project
    (below / "pyproject.toml").write_text("[tool.autoaccum]\n")
    assert find_project(deep) == Project(folder=below, lock=below / "autoaccum.lock")
    (deep / "pyproject.toml").write_text("[tool.other\n")
    assert find_project(deep).folder == below
    (below / "link").symlink_to(deep)
    (deep / "pyproject.toml").write_text("[tool.autoaccum]\n")
    assert find_project(below / "link").folder == deep


def test_a_path_is_known_by_its_place_in_the_project(project: Path) -> None:
    found = Project(folder=project, lock=project / "autoaccum.lock")
    for cwd, written, known in (
        (project, "./a.py", "a.py"),
        (project, "a.py", "a.py"),
        (project / "sub", "../a.py:name", "a.py:name"),
        (project / "sub", "a.py", "sub/a.py"),
        (project / "sub/deep", str(project / "a.py"), "a.py"),
        (project, "sub//deep/../a.py", "sub/a.py"),
        (project, "package.module", "package.module"),
        (project / "sub", "package.module:name", "package.module:name"),
    ):
        assert found.reference(written, cwd) == known
    (project / "link").symlink_to(project / "sub")
    (project / "sub/real.py").write_text("")
    (project / "sub/linked.py").symlink_to("/dev/null")
    assert found.reference("link/real.py", project) == "sub/real.py"
    assert found.reference("linked.py", project / "sub") == "sub/linked.py"
    with pytest.raises(
        UsageError, match=r"\.\./a\.py lies outside of .*, the folder of the lock: guard it from its own"
    ):
        found.reference("../a.py", project)
    with pytest.raises(UsageError, match=f"{project}-too/a.py lies outside"):
        found.reference(f"{project}-too/a.py", project)


ENTRY = '[[tool.autoaccum.guard]]\nworkload = "a.py"\n'
CARD = 'gpu = "rtx3090"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool]\nautoaccum = 1\n", "tool.autoaccum in PATH is 1: write [tool.autoaccum]"),
        ("[tool.autoaccum\n", "PATH is not valid TOML ("),
        (
            '[tool.autoaccum]\ntolerence = "1%"\n',
            "[tool.autoaccum] in PATH has the unknown key 'tolerence': did you mean",
        ),
        ("[tool.autoaccum]\nx = 1\n", "has the unknown key 'x': there are tolerance, lock, guard"),
        ("[tool.autoaccum]\ntolerance = 0.01\n", "the tolerance 0.01 is neither a share"),
        ("[tool.autoaccum]\nlock = 1\n", "lock in PATH is 1: name a file"),
        ('[tool.autoaccum]\nlock = ""\n', "lock in PATH is '': name a file"),
        ('[tool.autoaccum.guard]\nworkload = "a.py"\n', "guard in PATH is no list of tables: write [[tool.autoaccum"),
        ("[[tool.autoaccum.guard]]\n", "[[tool.autoaccum.guard]] 1 in PATH names no workload: add such as"),
        (ENTRY, "[[tool.autoaccum.guard]] 1 in PATH has no target-batch: add such as target-batch = 256"),
        (
            f"{ENTRY}{CARD}target_batch = 8\n",
            "1 in PATH has the unknown key 'target_batch': did you mean target-batch?",
        ),
        (f"{ENTRY}{CARD}gpus = []\ntarget-batch = 8\n", "has the unknown key 'gpus': did you mean gpu?"),
        (f"{ENTRY}{CARD}target-batch = 0\n", "1 in PATH: target-batch is 0: give a whole number of at least 1"),
        (f"{ENTRY}{CARD}target-batch = 8.0\n", "target-batch is 8.0: give a whole number"),
        (f"{ENTRY}gpu = []\ntarget-batch = 8\n", "1 in PATH: gpu is an empty list: name one"),
        (f'{ENTRY}gpu = "rtx3091"\ntarget-batch = 8\n', "1 in PATH: there is no 'rtx3091' among the"),
        (f'{ENTRY}{CARD}device = "cpu"\ntarget-batch = 8\n', "both --device cpu and --gpu rtx3090 are given"),
        (f"{ENTRY}target-batch = 8\n", "1 in PATH: neither a card nor a device is given"),
        (
            f"{ENTRY}{CARD}target-batch = 8\n" * 2,
            "[[tool.autoaccum.guard]] 2 in PATH names a.py on rtx3090, target 8, as 1 does: name it once",
        ),
        (f"{ENTRY.replace('a.py', '../a.py')}{CARD}target-batch = 8\n", "../a.py lies outside of"),
    ],
    ids=lambda value: None,
)
def test_what_a_project_cannot_say(project: Path, text: str, told: str) -> None:
    path = project / "pyproject.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        find_project(project / "sub")
    assert told.replace("PATH", str(path)) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.hint


def test_without_a_table_files_are_relative_to_the_lock_that_is_named(project: Path) -> None:
    deep = project / "sub/deep"
    (project / "autoaccum.lock").write_text("")
    found = find_project(deep, "../all.lock")
    assert (found.folder, found.lock.resolve()) == (project / "sub", project / "sub/all.lock")
    assert found.reference("train.py", deep) == "deep/train.py"
    assert find_project(deep).folder == project


def test_what_cannot_be_read(project: Path) -> None:
    (project / "pyproject.toml").write_bytes(b"[tool.autoaccum]\nlock = '\xff'")
    with pytest.raises(UsageError, match="cannot be read .it is not UTF-8.: correct that"):
        find_project(project)
    (project / "pyproject.toml").unlink()
    (project / "pyproject.toml").mkdir()
    assert find_project(project).cases == ()
    with pytest.raises(UsageError, match="the lock is ' ': name a file"):
        find_project(project, " ")
