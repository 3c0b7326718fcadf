"""`autoaccum plan --plot --report`: files beside the plan, refused before any trial where they could not be made."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import Command
from pictured_plans import usual
from small_classifier import LONG

from autoaccum.cli.outputs import Outputs
from autoaccum.errors import UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.figures.plan_figures import draw_memory

MODEL = LONG
GPU = ("--target-batch", "64", "--gpu", "rtx3090", "--memory", "1GiB")


def texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_bytes())
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_a_simulated_card_shows_where_its_memory_goes(folder: Path, command: Command) -> None:
    files = ["--plot", "memory.svg", "-o", "plan.json", "--report", "p.html"]
    done = command(folder, "plan", "model.py", *GPU, *files)
    assert done.returncode == 0, done.stderr
    assert "\npicture in memory.svg\n" in done.stdout
    assert "\nreport in p.html\n" in done.stdout
    plan, said = Plan.load(folder / "plan.json"), texts(folder / "memory.svg")
    assert f"micro-batch {plan.micro_batch}" in said
    told = {text.split(":")[0] for text in said}
    assert {"parameters", "activations", "optimizer state", "limit", "peak"} <= told
    assert "forward" in said
    assert plan.explanation is None, "a picture is not --explain"
    page = (folder / "p.html").read_text(encoding="utf-8")
    for told_there in ("Memory over one update", "Peak over the micro-batch", "expandable_segments", "--report p.html"):
        assert told_there in page
    names = ["memory.svg", "model.py", "p.html", "plan.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_cpu_shows_its_trials_and_json_stays_alone(folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(MODEL.replace("1024", "16").replace("4096", "16"))
    words = ["--target-batch", "2", "--device", "cpu", "--memory", "100MiB", "--json", "-q"]
    done = command(folder, "plan", "model.py", *words, "--plot", "memory.png", "--report", "p.html")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert json.loads(done.stdout)["explanation"] is None
    assert (folder / "memory.png").read_bytes() == draw_memory(plan, None, "png")
    assert "where memory goes is known for cards" in (folder / "p.html").read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    planned, _ = usual()
    names = {"-o": "plan.json", "--emit": "step.py", "--plot": "memory.svg"}
    files = {name: tmp_path / name for name in names.values()}
    outputs = Outputs({option: str(files[name]) for option, name in names.items()}, force=False)
    outputs.check("model.py", world_size=1)
    for name in ("plan.json", "step.py"):
        files[name].write_text("came meanwhile")
    with pytest.raises(UsageError, match=r"plan\.json exists already"):
        outputs.write(planned)
    assert outputs.written == {"--plot": files["memory.svg"]}
    assert any(text.startswith("limit") for text in texts(files["memory.svg"]))
    assert files["plan.json"].read_text() == "came meanwhile"
