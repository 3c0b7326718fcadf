"""`[tool.autoaccum]` of pyproject.toml: what a command takes of it, what stands above it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from json_schemas import COMMANDS, faults

from autoaccum.cli.settings import CASES, KINDS, OF_COMMAND, OF_PROJECT, find_settings, keys_of
from autoaccum.spec import SPEC_FIELDS

PROJECT = """
[tool.autoaccum]
gpu = "rtx3090"
memory = "80%"
target-batch = 64
world-size = 2
time-limit = 60

[tool.autoaccum.compare]
gpu = "t4,24GiB"
trial-limit = 9

[tool.autoaccum.fit]
check = "strict"

[tool.autoaccum.tune]
target-batch = "16..64"

[tool.autoaccum.verify]
target-batch = 8

[tool.autoaccum.guard]
tolerance = "2%"
"""
FIT = "--run-dir runs --steps 1"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a pyproject.toml, and go to a folder below it."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "deeper")

    def write(text: str) -> Path:
        (tmp_path / "pyproject.toml").write_text(text)
        return tmp_path

    return write


def parse(command: str, words: str) -> dict[str, Any]:
    return COMMANDS[command].make_context(command, words.split()).params


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("plan", "m.py", {"gpu": "rtx3090", "memory": "80%", "target_batch": 64, "world_size": 2, "time_limit": 60.0}),
        ("plan", "m.py --gpu t4 --target-batch 8", {"gpu": "t4", "target_batch": 8, "memory": "80%"}),
        ("plan", "m.py --device cpu", {"gpu": None, "device": "cpu", "target_batch": 64}),
        ("plan", "m.py --target-tokens 4096", {"target_batch": None, "target_tokens": 4096}),
        ("plan", "-- train {micro_batch} {iter_size}", {"target_batch": 64}),
        ("plan", "-- train {micro_batch}", {"target_batch": None, "gpu": "rtx3090"}),
        ("compare", "m.py", {"gpu": "t4,24GiB", "trial_limit": 9.0, "world_size": 2}),
        ("fit", f"m.py {FIT}", {"memory": "80%", "target_batch": 64, "check": "strict", "device": "auto"}),
        ("fit", f"m.py {FIT} --plan p", {"memory": None, "target_batch": None, "check": "strict"}),
        ("fit", f"m.py {FIT} --plan p --target-batch 8", {"memory": None, "target_batch": 8}),
        ("tune", "m.py", {"target_batch": range(16, 65), "memory": "80%", "time_limit": None}),
        ("verify", "m.py", {"target_batch": 8, "time_limit": None, "world_size": 1}),
        ("guard", "m.py", {"tolerance": "2%", "gpus": (), "target_batch": None, "memory": None}),
    ],
)
def test_a_setting_is_a_default(write: Write, command: str, words: str, expected: dict[str, Any]) -> None:
    write(PROJECT)
    params = parse(command, words)
    assert {name: params[name] for name in expected} == expected
    settings = find_settings(Path.cwd())
    assert settings is not None
    assert faults("pyproject", settings.table) == []


def test_ranks_of_a_launcher_are_as_many_as_there_are(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(PROJECT)
    monkeypatch.setenv("WORLD_SIZE", "4")
    params = parse("plan", "m.py")
    assert (params["gpu"], params["world_size"], params["target_batch"]) == (None, 1, 64)


def test_a_target_of_a_command_replaces_that_of_the_project(write: Write) -> None:
    write("[tool.autoaccum]\ntarget-batch = 8\n[tool.autoaccum.plan]\ntarget-tokens = 4096\n")
    for words, tokens in (("m.py", 4096), ("m.py --target-batch 8", None), ("-- train {micro_batch}", None)):
        assert parse("plan", words)["target_tokens"] == tokens
    assert parse("plan", "m.py")["target_batch"] is None


def test_the_nearest_table_is_read_and_none_above_the_repository(write: Write, tmp_path: Path) -> None:
    project = write(PROJECT)
    (project / "deep" / "pyproject.toml").write_text("tool = 'of another'\n[project]\nname = 'autoaccum-user'\n")
    (project / "deep" / "deeper" / "pyproject.toml").write_text("of another tool, and no TOML")
    found = find_settings(Path.cwd())
    assert found is not None
    assert found.file == project / "pyproject.toml"
    (project / "deep" / "pyproject.toml").write_text("[tool.autoaccum]\n")
    assert parse("plan", "m.py")["gpu"] is None
    (project / "deep" / "pyproject.toml").unlink()
    (project / "deep" / ".git").touch()  # As of a submodule.
    assert find_settings(Path.cwd()) is None


OF_ALL = (
    "choose gpu, memory, reserve, target-batch, target-tokens, world-size, time-limit or trial-limit, or a table of "
)
OF_GUARD = "choose tolerance, time-limit or cases"


@pytest.mark.parametrize(
    ("table", "line", "told"),
    [
        ("", "cards = 'x'", f"has the unknown key cards: {OF_ALL}plan, compare, fit, tune, verify or guard"),
        ("", "target_batch = 8", "has the unknown key target_batch: did you mean target-batch?"),
        ("", "tolerance = '1%'", "has the unknown key tolerance: it belongs to [tool.autoaccum.guard]"),
        ("", "precision = 'bf16'", f"has the unknown key precision: {OF_ALL}"),
        (".guad", "", "[tool.autoaccum] has the unknown key guad: did you mean guard?"),
        (".guard", "tolerence = '1%'", "has the unknown key tolerence: did you mean tolerance?"),
        ("", "guard = 3", f"[tool.autoaccum.guard] is 3, and no table: {OF_GUARD}"),
        (".guard", "tolerance = 'x'", "has tolerance = \"x\", and the tolerance 'x' is neither a share"),
        (".guard", "cases = 'm.py'", "has cases = 'm.py': give a list of strings"),
        ("", "gpu = 24", "has gpu = 24: give a string"),
        ("", "gpu = 'rtx409'", "has gpu = \"rtx409\", and there is no 'rtx409' among the"),
        ("", "gpu = 't4,a2'", "has gpu = \"t4,a2\", and there is no 't4,a2' among the"),
        ("", "gpu = 'all'", "has gpu = \"all\", and there is no 'all' among the"),
        ("", "world-size = '1..8'", 'has world-size = "1..8", and world_size is range(1, 9): give a whole number'),
        ("", "target-batch = '64'", 'has target-batch = "64": give a whole number'),
        ("", "target-batch = true", "has target-batch = true: give a whole number"),
        ("", "target-batch = 0", "has target-batch = 0: 0 is not in the range x>=1"),
        ("", "target-batch = 1\ntarget-tokens = 9", "has both target-batch and target-tokens: keep one of them"),
        ("", "world-size = 1.5", "has world-size = 1.5: give a whole number or a string"),
        ("", "memory = '10'", "has memory = \"10\", and '10' is not a memory size: write a number and a unit"),
        ("", "time-limit = inf", "has time-limit = Infinity, and the time limit is inf: give a number of seconds"),
        (".plan", "max-trials = 1.5", "has max-trials = 1.5: give a whole number"),
        (".plan", "gpu = 2024-01-01", 'has gpu = "2024-01-01": give a string'),
        ("", "gpu =", "pyproject.toml cannot be read (Invalid value (at end of document)): correct the file"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(write: Write, table: str, line: str, told: str) -> None:
    write(f"[tool.autoaccum{table}]\n{line}")
    result = invoke(*(("guard",) if table == ".guard" else ("plan", "m.py", "--target-batch", "8")))
    assert (result.exit_code, result.stdout) == (2, "")
    told = told if told.startswith(("[", "pyproject")) else f"pyproject.toml: [tool.autoaccum{table}] {told}"
    assert result.stderr.startswith("error: ../../pyproject.toml")
    assert told in " ".join(result.stderr.split())
    assert [invoke(*words.split()).exit_code for words in ("plan --help", "gpus t4")] == [0, 0]


@pytest.mark.parametrize("command", OF_COMMAND)
def test_every_setting_is_a_flag_of_its_command_and_leaves_workloads_their_own(command: str) -> None:
    parameters = {flag: parameter for parameter in COMMANDS[command].params for flag in parameter.opts}
    for key in set(keys_of(command)) - {CASES}:
        parameter = parameters[f"--{key}"]
        assert parameter.type.name in KINDS, "a switch could not be taken back"
        assert parameter.name not in (*SPEC_FIELDS, "overrides")
    assert OF_PROJECT.keys() < OF_COMMAND.keys()
