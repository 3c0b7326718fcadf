"""The files of a plan: refused before any trial if they could not be written, and each written by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from command_line import Command
from factories import change_facts
from small_classifier import LONG, MODEL
from synthetic_traces import INSPECTION

from autoaccum import api
from autoaccum.cli import main
from autoaccum.cli.outputs import Outputs
from autoaccum.errors import UsageError
from autoaccum.planning.plan_events import Inspected
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.figures import draw_memory


def texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_bytes())
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_a_simulated_card_shows_where_its_memory_goes(folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(LONG)
    words = ["--target-batch", "64", "--gpu", "rtx3090", "--memory", "1GiB"]
    files = ["--plot", "memory.svg", "-o", "plan.json", "--report", "p.html", "--emit", "train_step.py"]
    done = command(folder, "plan", "model.py", *words, *files)
    assert done.returncode == 0, done.stderr
    for line in ("picture in memory.svg", "report in p.html", "train without autoaccum: train_step.py is the step in"):
        assert f"\n{line}" in done.stdout
    plan, said = Plan.load(folder / "plan.json"), texts(folder / "memory.svg")
    assert f"micro-batch {plan.micro_batch}" in said
    told = {text.split(":")[0] for text in said}
    assert {"forward", "parameters", "activations", "optimizer state", "limit", "peak"} <= told
    assert plan.explanation is None, "a picture is not --explain"
    assert f"MICRO_BATCH = {plan.micro_batch}  #" in (folder / "train_step.py").read_text()
    page = (folder / "p.html").read_text(encoding="utf-8")
    for text in ("Memory over one update", "Peak over the micro-batch", "expandable_segments", "--report p.html"):
        assert text in page
    names = ["memory.svg", "model.py", "p.html", "plan.json", "train_step.py"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_cpu_shows_its_trials_and_json_stays_alone(folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(LONG.replace("1024", "16").replace("4096", "16"))
    words = ["--target-batch", "2", "--device", "cpu", "--memory", "100MiB", "--json", "-q"]
    done = command(folder, "plan", "model.py", *words, "--plot", "memory.png", "--report", "p.html")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert json.loads(done.stdout)["explanation"] is None
    assert (folder / "memory.png").read_bytes() == draw_memory(plan, None, "png")
    assert "where memory goes is known only for simulated cards" in (folder / "p.html").read_text(encoding="utf-8")


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
    result = CliRunner().invoke(main, ["plan", "m.py", "--target-batch", "8", "--emit", "step.py"])
    assert result.exit_code == 2
    assert "micro-batches need something of each other" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "./same", "--emit", "same"], "--emit names the file of -o, same: choose another name"),
        (["--emit", "torch.py"], "would hide the module torch"),
        (["--report", "nowhere/p.html"], "nowhere for p.html: create it first"),
        (["--emit", "step.py", "--world-size", "2"], "the plan is for 2 ranks"),
        (["--plot", "memory.pdf"], "the picture memory.pdf ends in .pdf: give a name that ends in .svg or .png"),
        (["--plot", "/dev/null"], "/dev/null is not a regular file: give a name that ends in .svg or .png"),
        (["--plot", "model.svg"], "model.svg exists already: add --force to overwrite it, or choose another name"),
    ],
)
def test_what_cannot_be_written_is_said_before_any_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.svg").write_text("precious")
    result = CliRunner().invoke(main, ["plan", "model.py", "--target-batch", "8", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (folder / "model.svg").read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "model.svg"]


@pytest.mark.parametrize("workload", ["model.py:MODEL", "./model.py"])
def test_the_workload_is_never_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch, workload: str) -> None:
    monkeypatch.chdir(folder)
    (folder / "link.py").symlink_to(folder / "model.py")
    for words in (["-o", "model.py"], ["--emit", "link.py"], ["--plot", "model.py"]):
        result = CliRunner().invoke(main, ["plan", workload, "--target-batch", "8", "--force", *words])
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{words[0]} names the workload itself, {words[1]}: choose another name" in result.stderr
    assert (folder / "model.py").read_text() == MODEL
