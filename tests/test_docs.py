"""The documentation: its code runs, its commands and links are right, and no page says what another says."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from command_line import environment
from factories import make_plan
from torch import nn
from warm_children import WarmPython

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.cli.root import main
from autoaccum.devices.trial_run import TrialRun
from autoaccum.sources.source import FileSource

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "examples" / "docs"
READMES = (ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", ROOT / "tests" / "benchmarks" / "README.md")
PAGES = {path: path.read_text(encoding="utf-8") for path in (*sorted(DOCS.rglob("*.md")), *READMES)}
TEXT = "\n".join(PAGES.values())
FENCE = re.compile(r"^ *```(\w*).*?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def code(page: str, heading: str) -> str:
    """Return the first Python block below a heading of a page."""
    below = PAGES[DOCS / page].partition(f"# {heading}\n")[2]
    return next(str(text) for language, text in FENCE.findall(below) if language == "python")


def test_the_workload_file_is_one(tmp_path: Path) -> None:
    model = "class MyModel(nn.Sequential):\n    def __init__(self): super().__init__(nn.Flatten(), nn.LazyLinear(10))\n"
    path = tmp_path / "model.py"
    workload_file = code("guides/workload_file.md", "The workload file")
    path.write_text(f"from torch import nn\n{model}{workload_file}", encoding="utf-8")
    workload = FileSource(str(path)).load()
    assert workload.precision == "bf16"
    assert workload.objective.weight(workload.build_batch(3)) == 3


def test_the_weight_counts_the_shifted_labels() -> None:
    names: dict[str, object] = {}
    exec(code("guides/workload_file.md", "What the loss divides by"), names)
    weight = names["weight"]
    assert callable(weight)
    assert weight({"labels": torch.tensor([[5, 1, -100], [5, 1, 2]])}) == 3


def test_what_stands_around_the_step_is_part_of_a_workload(tmp_path: Path) -> None:
    head = "import torch\nfrom torch import nn\ndef batch(size): return torch.zeros(size, 4), torch.arange(size) % 3\n"
    path = tmp_path / "model.py"
    lines = "model = nn.Linear(4, 3)\ncriterion = nn.CrossEntropyLoss()\n"
    path.write_text(f"{head}{lines}{code('guides/workload_file.md', 'Memory around the step')}", encoding="utf-8")
    workload = FileSource(str(path)).load()
    trial_run = TrialRun(workload, 4)
    trial_run.run((2, 2))
    assert workload.evaluation_batch == 64
    assert len(trial_run.averages) == len(trial_run.outputs) == 2, "weight and bias, output and loss"


def test_loops_that_are_called_right_have_the_gradient_of_the_whole_batch() -> None:
    """And those that are called wrong have another."""
    model = nn.Sequential(nn.Embedding(50, 4), head := nn.Linear(4, 50)).double()
    window = [torch.randint(50, (size, 6)) for size in (3, 3, 1)]

    def loss(model: nn.Module, ids: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        logits = model(ids[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction=reduction)

    names: dict[str, Any] = {"model": model, "loss": loss, "window": window, "args": SimpleNamespace(accum=4)}
    names["cross_entropy_sum"] = partial(loss, reduction="sum")
    (whole,) = torch.autograd.grad(loss(model, torch.cat(window)), [head.weight])
    blocks = FENCE.findall(PAGES[DOCS / "concepts" / "accumulation.md"])
    loops = [text for language, text in blocks if language == "python" and "backward()" in text]
    assert len(loops) == 4
    for text in loops:
        model.zero_grad()
        exec(text, names)
        assert head.weight.grad is not None
        assert torch.allclose(head.weight.grad, whole) == ("# wrong" not in text), text


def test_a_coupled_loss_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    head = "import torch\nfrom torch import nn\ndef batch(size): return torch.randn(size, 4), torch.randn(size, 4)\n"
    path = tmp_path / "model.py"
    loss = code("guides/whole_batch.md", "Losses that compare samples")
    path.write_text(f"{head}model = nn.Linear(4, 3)\n{loss}", encoding="utf-8")
    workload = FileSource(str(path)).load()
    model, batch = workload.build_model(), workload.build_batch(6)
    steps = torch.optim.SGD(model.parameters(), lr=0.0)
    whole, parts = (Accumulator(model, steps, workload.objective, micro_batch=size).step(batch) for size in (6, 4))
    assert parts.micro_batches == (3, 3)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_loop_of_your_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    make_plan(8, 3, workload={}).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    loader = [(torch.randn(8, 4), torch.randint(0, 2, (8,))), (torch.randn(5, 4), torch.randint(0, 2, (5,)))]
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": loader,
    }
    exec(code("guides/own_loop.md", "A loop of your own"), names)
    assert names["result"].samples == 5  # type: ignore[attr-defined]
    assert not torch.equal(model.weight, before)


LIVE = """
import torch
from torch import nn

model = nn.Linear(4, 2)
before = model.weight.detach().clone()
batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

{block}
assert sum(plan.micro_batches) == plan.target_batch == 256
assert torch.equal(model.weight, before)
assert not optimizer.state
"""


def test_live_objects_are_planned_as_they_are(warm_python: WarmPython) -> None:
    """In a process of its own: pytest's has threads, which a limit on its memory would reach."""
    script = LIVE.format(block=code("guides/own_loop.md", "Plan from code"))
    done = warm_python(ROOT, "-c", script, environment=environment(), measured=True)
    assert done.returncode == 0, done.stderr


FIT = """
import torch
from torch import nn
model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
dataset = torch.utils.data.TensorDataset(torch.randn(600, 4), torch.randint(0, 3, (600,)))
{block}
assert (result.updates, result.samples) == (9, 1800)
assert result.plan is not None
"""


def test_one_call_trains(tmp_path: Path, warm_python: WarmPython) -> None:
    """In a process of its own, as above."""
    script = FIT.format(block=code("commands/fit.md", "fit"))
    done = warm_python(tmp_path, "-c", script, environment=environment(), measured=True)
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert {"metrics.jsonl", "plan.json", "checkpoints", "model.pt"} <= written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_parses(page: Path) -> None:
    blocks = "\n".join(text.replace("\\\n", "") for _, text in FENCE.findall(PAGES[page]))
    lines = re.findall(r"^ *(?:\$ )?(?:torchrun .*-m )?autoaccum (\w+)\b([^#|\n]*)", blocks, re.MULTILINE)
    lines += re.findall(r"`autoaccum (\w+) ([^`\n]+[^-`\n])`", FENCE.sub("", PAGES[page]))
    for command, words in lines:
        typed = [{"N": "1"}.get(word, word) for word in shlex.split(words) if word != "..."]
        import_module(f"autoaccum.cli.{command}").command.make_context(command, typed)


def test_every_command_has_a_page_that_ends_with_its_options() -> None:
    for name in main.list_commands(click.Context(main)):
        page = PAGES[DOCS / "commands" / f"{name}.md"]
        assert page.startswith(f"# {name}\n")
        assert page.endswith(f"\n## Options\n\n<!-- help: {name} -->\n")
        assert f"[{name}]({name}.md)" in PAGES[DOCS / "commands" / "index.md"]


def test_files_and_scripts_that_pages_name_are_there() -> None:
    named = re.findall(r"`(?:python |pytest )?((?:autoaccum|tests|examples)/[\w/.]*)", TEXT)
    assert {"tests/benchmarks/peers.py", "tests/gpu/"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text)]
    assert len(links) > 20
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []
    chosen = re.findall(r"`pytest (tests/[\w/.]+) -k (\w+)`", TEXT)
    for place, words in chosen:
        files = [ROOT / place] if (ROOT / place).is_file() else list((ROOT / place).glob("test_*.py"))
        assert any(re.search(rf"def test_\w*{words}", path.read_text()) for path in files), place


def test_no_sentence_stands_on_two_pages() -> None:
    def sentences(text: str) -> set[str]:
        prose = FENCE.sub("", text).replace("**", "")
        return {sentence.strip(" -*|") for sentence in re.split(r"[.:;?!]\s|\||\n", prose)}

    pages = {page: sentences(text) for page, text in PAGES.items() if page not in READMES}
    count = Counter(sentence for page in pages.values() for sentence in page if len(sentence) > 60)
    assert [sentence for sentence, pages in count.items() if pages > 1] == []
