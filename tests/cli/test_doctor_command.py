from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, autoaccum, invoke
from factories import make_plan

from autoaccum.integrations import LIBRARIES
from autoaccum.messages import message
from autoaccum.reporting.console import Facts
from autoaccum.reporting.doctor_report import doctor_blocks, doctor_record
from autoaccum.units import GIB

NO_PLAN = "not available (the current folder has no plan)"


def rows(text: str) -> dict[str, str]:
    return {line[:13].strip(): line[13:] for line in text.splitlines() if not line.startswith(" ")}


def test_it_needs_no_plan_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from autoaccum.cli import main\n"
        "try: main(['doctor'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = autoaccum(tmp_path, code=code, PYTORCH_ALLOC_CONF="expandable_segments:True", HF_TOKEN="hf_private")
    assert (done.returncode, done.stderr) == (0, "False\n")
    shown = rows(done.stdout)
    assert {"autoaccum", "python", "torch", "libraries", "driver", "host memory"} <= shown.keys()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in shown["settings"]
    assert shown["plan"] == NO_PLAN
    assert "hf_private" not in done.stdout


@pytest.mark.parametrize("given", [(), ("old.json",)])
def test_the_newest_plan_or_the_one_that_is_named(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told: dict[str, Any] = {"warnings": (message("random_memory"),), "notes": (message("statistics_unset"),)}
    for age, (name, target) in enumerate({"new.json": 8, "old.json": 6}.items()):
        make_plan(target, 3, workload={"reference": "model.py"}, **told).save(tmp_path / name)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "data.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text("{")
    shown = rows(invoke("doctor", *given).stdout)
    assert shown["plan"].startswith("old.json, measured" if given else "new.json, measured")
    assert shown["parts"] == ("3 + 3 = 6" if given else "3 + 3 + 2 = 8")
    assert shown["messages"] == "random_memory, statistics_unset"
    record = json.loads(invoke("doctor", *given, "--json").stdout)["plan"]
    assert (record["file"], record["target_batch"]) == (("old.json", 6) if given else ("new.json", 8))


@pytest.mark.parametrize(
    ("name", "reason"), [("none.json", "there is no file none.json"), ("cut.json", "cut.json is not valid JSON (")]
)
def test_a_plan_that_cannot_be_read_is_not_available(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.json").write_text('{"schema": 3')
    result = invoke("doctor", name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert rows(result.stdout)["plan"].startswith(f"not available ({reason}")


def test_neither_secrets_nor_the_home_folder_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    words = shlex.split(
        "WANDB_API_KEY=s3cr3t /home/ada/bin/python t.py --hf-token 's3cr3t $' --hub.token=s3cr3t --max-tokens 512"
    )
    words += ["--password", "a s3cr3t", "--secret=a s3cr3t", "--api-key", "it's3cr3t"]
    workload = {"reference": shlex.join(words), "command": words, "overrides": {"password": "s3cr3t"}}
    make_plan(8, 8, workload=workload).save(tmp_path / "plan.json")
    for how in ((), ("--json",)):
        shown = invoke("doctor", *how, env={"COLUMNS": "1000"}).stdout
        assert "s3cr3t" not in shown
        assert "/home/ada" not in shown
        assert "~/bin/python t.py --hf-token *** --hub.token=*** --max-tokens 512 --password *** --secret=***" in shown


def test_cards_and_builds_for_cuda() -> None:
    machine: dict[str, Any] = {
        "torch": "2.14.1",
        "cuda": "13.0",
        "cudnn": None,
        "libraries": {"peft": "0.20"},
        "driver": "580.95.05",
        "cards": [{"name": "Tesla T4", "total_bytes": 15 * GIB}, {"name": None, "total_bytes": None}],
        "host": {"total_bytes": None, "free_bytes": None, "cgroup_limit_bytes": 8 * GIB},
    }
    (facts,) = doctor_blocks(doctor_record((), "none") | machine, "none")
    assert isinstance(facts, Facts)
    assert [value for name, value in facts.rows if name == "card"] == [
        "Tesla T4, 15.0 GiB",
        "not available, not available",
    ]
    shown = {name: str(value) for name, value in facts.rows}
    assert shown["torch"] == "2.14.1, CUDA 13.0, cuDNN not available"
    assert (shown["libraries"], shown["driver"]) == ("peft 0.20", "580.95.05")
    assert shown["host memory"] == "not available, not available free; the cgroup's limit is 8.0 GiB"


def test_the_libraries_are_those_of_the_extra() -> None:
    (extra,) = re.findall(r"^libraries = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r'"([\w-]+)>=', extra)) == LIBRARIES
