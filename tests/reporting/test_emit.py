"""The emitted file as text: formatted, alone, and refused where it could not be right; .ci/run checks its types."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import environment
from emitted_variants import plan_by_hand, with_recipe, workload, write_variants
from warm_children import WarmPython

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.api import plan as plan_by_trials
from autoaccum.errors import UsageError
from autoaccum.messages import Message
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.emit import check_emittable, emit_wrapper, module_name
from autoaccum.sources.source import FileSource
from autoaccum.spec import DeviceFacts, TrainingSpec
from autoaccum.units import GIB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def a_plan() -> Plan:
    return plan_by_hand(workload(name="net"), 18, 6)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emitted")
    write_variants(folder)
    return folder


def call(*command: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_is_formatted(written: Path) -> None:
    options = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    call("-m", "ruff", "format", "--check", *options, ".", cwd=written)
    call("-m", "ruff", "check", *options, ".", cwd=written)


def test_fits_on_one_screen(written: Path) -> None:
    assert max(path.read_text(encoding="utf-8").count("\n") for path in written.iterdir()) <= 105


def test_says_where_it_comes_from(a_plan: Plan) -> None:
    found = ast.get_docstring(ast.parse(emit_wrapper(a_plan)))
    assert found is not None
    said = " ".join(found.split())
    assert "micro-batches of at most 6 samples." in said
    assert "Written by `autoaccum plan` for net (Linear, digest 0123456789ab): 18 samples an update" in said
    assert "6 + 6 + 6, on cpu with 128 MiB" in said
    assert "autoaccum.Accumulator does" in said
    assert "    from train_step import train_step" in found
    assert "train_step(model, optimizer, criterion, batch)" in found
    assert "The plan warned" not in found
    assert "    from my_step import train_step" in emit_wrapper(a_plan, module="my_step")
    card = DeviceFacts(name="cuda:0", kind="cuda", card="NVIDIA H200", total_bytes=139 * GIB)
    warned = dataclasses.replace(a_plan, device=card, warnings=(Message("compares_samples"),))
    text = emit_wrapper(with_recipe(warned, "fp16"))
    assert "on NVIDIA H200" in " ".join(text.split())
    assert "The plan warned:\n\n- the loss compares samples with each other" in text
    assert 'scaler = torch.amp.GradScaler("cuda")' in text
    assert "gradient, to rounding" not in text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("my step.py", "cannot be imported under that name"),
        ("class.py", "cannot be imported under that name"),
        ("step.txt", "cannot be imported under that name"),
        ("torch.py", "would hide the module torch: take a name such as train_step.py"),
    ],
)
def test_a_name_that_nothing_could_import(path: str, says: str) -> None:
    assert module_name("some/folder of mine/größe.py") == "größe"
    with pytest.raises(UsageError, match=says):
        module_name(path)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, "the plan is for 2 ranks"),
        ({"savers": ("recompute",)}, "the plan uses recompute"),
        ({"batchnorm": "frozen"}, 'batchnorm is "frozen"'),
        ({"coupled": True}, "micro-batches need something of each other"),
        ({"multiple_of": 2}, "micro-batches are multiples of 2"),
    ],
)
def test_refuses_what_takes_more_than_a_few_lines(changes: dict[str, Any], seen: str) -> None:
    world_size = 1 if changes else 2
    with pytest.raises(UsageError, match=f"plain PyTorch, which cannot do this: {seen}.*: leave out --emit, and train"):
        check_emittable(TrainingSpec(**changes), world_size=world_size)


@pytest.mark.parametrize(
    ("recipe", "seen"),
    [
        ({"batch": "value", "calls_criterion": False}, "more than tensors in tuples"),
        (
            {"batch": {"dict": {"x": "tensor", "graph": "other"}}, "calls_criterion": False},
            "more than tensors in tuples",
        ),
        ({"batch": {"mapping": {"x": "tensor"}}, "calls_criterion": False}, "more than tensors in tuples"),
        ({"batch": "own", "calls_criterion": False}, r"the workload's own split\(batch, sizes\)"),
        ({"divisor": "class weights"}, "mean is over class weights"),
        ({"terms": ["a", "b"]}, "the loss has several terms"),
        ({"half": ["bfloat16"]}, "parameters are in bfloat16, whose gradients have to be summed in fp32"),
        ({"misweighted": "by tokens"}, "would give its parts wrong weights: by tokens"),
    ],
)
def test_refuses_a_recipe_that_cannot_be_written_down(a_plan: Plan, recipe: dict[str, Any], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        emit_wrapper(with_recipe(a_plan, **{"divisor": "samples", **recipe}))


FILE = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def batch(size):
    return torch.randn(size, 64), torch.randint(0, 10, (size,))


criterion = nn.CrossEntropyLoss(ignore_index=3)
precision = "bf16"
"""

ALONE = """
import sys
sys.modules["autoaccum"] = None  # an import of it would fail
sys.path[:0] = [{folder!r}]
import torch
from workload import batch, criterion, model
from train_step import MICRO_BATCH, cut, train_step
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
print(MICRO_BATCH, [len(part[0]) for part in cut(batch({target}))])
print([train_step(net, optimizer, criterion, batch(size), clip_norm=1.0) for size in ({target}, 5)])
"""


@pytest.mark.slow
def test_a_real_plan_s_file_trains_where_there_is_no_autoaccum_and_so_does_the_plan(
    tmp_path: Path, warm_children: None, warm_python: WarmPython
) -> None:
    (tmp_path / "workload.py").write_text(FILE, encoding="utf-8")
    plan = plan_by_trials(tmp_path / "workload.py", target_batch=8, device="cpu", max_micro_batch=3)
    assert plan.micro_batches == (3, 3, 2)
    work = FileSource(str(tmp_path / "workload.py")).load()
    model = work.build_model()
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), work.criterion, plan=plan)
    assert accumulator.step(work.build_batch(8)).micro_batches == (3, 3, 2)
    (tmp_path / "train_step.py").write_text(emit_wrapper(plan), encoding="utf-8")
    code = ALONE.format(folder=str(tmp_path), target=plan.target_batch)
    done = warm_python(tmp_path, "-c", code, environment=environment())
    assert done.returncode == 0, done.stderr
    sizes, losses = done.stdout.splitlines()
    assert sizes == f"{plan.micro_batch} {list(plan.micro_batches)}"
    assert "nan" not in losses
