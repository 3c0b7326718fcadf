"""The files of a plan: refused before any trial if they could not be written, and each written by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import Command, invoke
from factories import change_facts
from json_schemas import faults
from small_classifier import LONG
from synthetic_traces import INSPECTION

from autoaccum import api
from autoaccum.cli.outputs import Outputs
from autoaccum.errors import UsageError
from autoaccum.messages import message
from autoaccum.planning.plan_events import Inspected
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.figures import draw_memory


def texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_bytes())
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_a_simulated_card_shows_where_its_memory_goes(tmp_path: Path, command: Command) -> None:
    (tmp_path / "model.py").write_text(LONG)
    words = ["--target-batch", "64", "--gpu", "rtx3090", "--memory", "1GiB"]
    files = ["--plot", "memory.svg", "-o", "plan.json", "--report", "p.html", "--emit", "train_step.py"]
    done = command(tmp_path, "plan", "model.py", *words, *files)
    assert done.returncode == 0, done.stderr
    for line in ("picture in memory.svg", "report in p.html", "train without autoaccum: train_step.py is the step in"):
        assert f"\n{line}" in done.stdout
    plan, said = Plan.load(tmp_path / "plan.json"), texts(tmp_path / "memory.svg")
    assert f"micro-batch {plan.micro_batch}" in said
    told = {text.split(":")[0] for text in said}
    assert {"forward", "parameters", "activations", "optimizer state", "limit", "peak"} <= told
    assert faults("plan", json.loads((tmp_path / "plan.json").read_text())) == []
    assert plan.explanation is None, "a picture is not --explain"
    assert f"MICRO_BATCH = {plan.micro_batch}  #" in (tmp_path / "train_step.py").read_text()
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    for text in ("Memory over one update", "Peak over the micro-batch", "expandable_segments", "--report p.html"):
        assert text in page
    names = ["memory.svg", "model.py", "p.html", "plan.json", "train_step.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_cpu_shows_its_trials_and_json_stays_alone(tmp_path: Path, command: Command) -> None:
    (tmp_path / "model.py").write_text(LONG.replace("1024", "16").replace("4096", "16"))
    words = ["--target-batch", "2", "--device", "cpu", "--memory", "100MiB", "--json", "-q"]
    done = command(tmp_path, "plan", "model.py", *words, "--plot", "memory.png", "--report", "p.html")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert json.loads(done.stdout)["explanation"] is None
    assert faults("plan", json.loads(done.stdout)) == []
    assert (tmp_path / "memory.png").read_bytes() == draw_memory(plan, None, "png")
    assert str(message("memory_unknown")) in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    names = {"output": "plan.json", "emit": "step.py", "plot": "memory.svg"}
    paths = {name: tmp_path / name for name in names.values()}
    outputs = Outputs({name: str(paths[file]) for name, file in names.items()}, "model.py")
    for name in ("plan.json", "step.py"):
        paths[name].write_text("came meanwhile")
    with pytest.raises(UsageError, match=r"plan\.json exists already"):
        outputs.write(dict.fromkeys(("-o", "--emit", "--plot"), lambda file: f"content of {file}"))
    assert outputs.written == {"--plot": paths["memory.svg"]}
    assert paths["memory.svg"].read_text() == f"content of {paths['memory.svg']}"
    assert paths["plan.json"].read_text() == "came meanwhile"


def test_a_mode_that_cannot_be_emitted_is_refused_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object, on_event: Callable[[Inspected], None], **__: object) -> None:
        on_event(Inspected(change_facts(INSPECTION, whole_batch="lockstep"), "cpu", 1, 8, False))

    monkeypatch.setattr(api, "plan", plan)
    result = invoke("plan", "m.py", "--target-batch", "8", "--emit", "step.py")
    assert result.exit_code == 2
    assert "micro-batches need something of each other" in result.stderr
